"""The user's cache; and checks of files and folders that a user has named, before anything depends on them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from omni_actors.errors import ConfigError


def user_cache() -> Path:
    """This package's folder in the user's cache; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "omni_actors"


def expanded(name: str | Path, where: str, base: Path | None = None) -> Path:
    """Return a path with `~` replaced, absolute.

    Args:
        where: what names the path: a flag, or a key of the YAML.
        base: folder to which a relative path belongs; the current one if `None`.

    Raises:
        ConfigError: it cannot be a path.
    """
    if "\0" in str(name):
        raise ConfigError(f"{where}: {str(name)!r} holds a NUL character, which no path can.")
    try:
        path = ((base or Path()) / Path(name).expanduser()).absolute()
        path.exists()  # for the errors of names that are too long
    except RuntimeError as error:  # `~name` of an unknown user
        raise ConfigError(f"{where}: there is no home folder for {str(name)!r}.") from error
    except OSError as error:
        raise ConfigError(f"{where}: {_short(str(name))} cannot be a path: {error.strerror}.") from error
    return path


def check_readable(path: Path, where: str) -> int:
    """Raise `ConfigError` unless `path` is a file that can be read; returns its size in bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not make us wait
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path}: {error.strerror}.") from error
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{where}: {path} is not a regular file.")
    return found.st_size


def check_file_can_be_written(path: Path, where: str) -> None:
    """Raise `ConfigError` unless a file could be written at `path`. Writes nothing."""
    if path.is_dir():
        raise ConfigError(f"{where}: {path} is a folder.", hint="Give the name of a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"{where}: there is no folder {path.parent}.", hint="Make it first.")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK if target == path else os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: {target} is not writable for this user.")


def check_folder_can_be_made(path: Path, where: str) -> None:
    """Raise `ConfigError` unless `path` is a folder that can be written to, or could be made. Makes nothing."""
    existing = path
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{where}: {existing} is not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: {existing} is not writable for this user.")


def check_own_folder(folder: Path, what: str) -> None:
    """Raise `ConfigError` for a folder in which others may work, such as /tmp, and for one (or a link) that is theirs.

    Args:
        what: what the folder is, as a message begins.
    """
    for status in (folder.lstat(), folder.stat()):
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{what} {folder} belongs to user {status.st_uid}, and this process is of user {os.geteuid()}.",
                hint="Choose another folder, or start as its owner.",
            )
    if folder.stat().st_mode & 0o022:
        raise ConfigError(
            f"{what} {folder} can be written to by others.",
            hint=f"Choose a folder for this alone, or: chmod go-w {folder}",
        )


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else f"{name[:80]}...")
