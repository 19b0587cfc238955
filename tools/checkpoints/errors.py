"""Reasons why a checkpoint was not written."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be written, or the one written does not behave as promised."""


class FolderError(CheckpointError):
    """The folder holds something that this package did not write."""
