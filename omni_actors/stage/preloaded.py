"""Imports that failed in the fork server. It has no one to report to but the processes that are forked from it.

The server of `multiprocessing` skips a module that cannot be imported, and ends silently at any other error.
"""

from __future__ import annotations

FAILURES: list[str] = []  # a sentence each, with the module's name
