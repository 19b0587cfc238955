"""The run directories of this user's pipelines: a folder of links to them, by which commands find what runs here."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

LISTED = "listed"  # in a run directory: a link back to its link, as other processes may have other temporary folders


def add(run_directory: Path) -> Path:
    """List a run directory and return its link. Raises `OSError` if the folder of links cannot be used."""
    folder = Path(tempfile.gettempdir()) / f"omni-actors-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError(f"others may write to {folder}")
    remove(run_directory)
    folder.mkdir(mode=0o700, exist_ok=True)  # the line above removes an empty one
    link = folder / f"{os.getpid()}-{run_directory.name}"
    link.unlink(missing_ok=True)
    link.symlink_to(run_directory)
    (run_directory / LISTED).symlink_to(link)
    return link


def remove(run_directory: Path) -> None:
    """List a run directory no longer. Idempotent."""
    back = run_directory / LISTED
    with contextlib.suppress(OSError):  # it is not listed
        forget(Path(os.readlink(back)))
        back.unlink()


def forget(link: Path) -> None:
    """Remove a link, and the folder of links when it is empty. Idempotent."""
    with contextlib.suppress(OSError):  # others are in it, or another process was faster
        link.unlink(missing_ok=True)
        link.parent.rmdir()


def entries() -> Iterator[tuple[Path, Path]]:
    """All links with what they lead to; of a killed launcher, that may be gone."""
    folder = Path(tempfile.gettempdir()) / f"omni-actors-{os.geteuid()}"
    with contextlib.suppress(OSError):  # nothing was ever listed, or a link has just been removed
        if _is_ours(folder):
            for link in sorted(folder.iterdir()):
                yield link, Path(os.readlink(link))


def _is_ours(folder: Path) -> bool:
    """Whether no one else can have put links there: others may write to the folder that holds it."""
    status = folder.lstat()
    return status.st_uid == os.geteuid() and not folder.is_symlink() and not status.st_mode & 0o022
