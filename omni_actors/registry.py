"""The run directories of this user's pipelines: a folder of links to them, by which commands find what runs here."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"omni-actors-{os.geteuid()}"


def add(run_directory: Path) -> None:
    """List a run directory. Raises `OSError` if the folder of links is not ours or cannot be written to."""
    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError(f"{folder} belongs to another user")
    remove(run_directory, keep_folder=True)
    (folder / f"{os.getpid()}-{run_directory.name}").symlink_to(run_directory)


def remove(run_directory: Path, keep_folder: bool = False) -> None:
    """List a run directory no longer, and remove the folder of links when it is empty. Idempotent."""
    folder = _folder()
    with contextlib.suppress(OSError):  # another process removes the same link, or the folder, or there is none
        for link in folder.iterdir():
            if link.is_symlink() and os.readlink(link) == str(run_directory):
                link.unlink(missing_ok=True)
        if not keep_folder:
            folder.rmdir()


def run_directories() -> list[Path]:
    """All that are listed; of a killed launcher, it may be gone."""
    folder = _folder()
    try:
        return [Path(os.readlink(link)) for link in sorted(folder.iterdir()) if _is_ours(folder)]
    except OSError:  # nothing was ever listed, or a link has just been removed
        return []


def _is_ours(folder: Path) -> bool:
    """Whether no one else can have put links there: others may write to the folder that holds it."""
    status = folder.lstat()
    return status.st_uid == os.geteuid() and not folder.is_symlink() and not status.st_mode & 0o022
