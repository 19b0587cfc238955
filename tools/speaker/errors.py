"""Errors of the tools that make the speaking checkpoint."""

from __future__ import annotations


class SpeakerError(Exception):
    """A step cannot run: something is missing or does not fit; the message says what to do."""
