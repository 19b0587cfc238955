"""What went wrong while the fork server imported what stages need: it has nobody to tell but those forked from it.

multiprocessing's server passes over a module that cannot be imported, and ends without a word at any other error.
"""

from __future__ import annotations

FAILURES: list[str] = []  # a sentence each, with the module's name
