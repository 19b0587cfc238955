"""Errors of the checkpoint writers."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint cannot be written, or its outputs do not pass the checks."""


class FolderError(CheckpointError):
    """The folder holds files that this package did not write."""
