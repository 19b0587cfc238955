"""The run directory: the one place for a pipeline's socket files, logs and lock. Swept at start, cleared at exit."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

from omni_actors.errors import ConfigError

MAX_IPC_PATH = 107  # bytes that a Unix socket address can hold
LONGEST_SOCKET_NAME = 60
LOCK = "lock"
LOCK_SECONDS = 0.5  # the stages of a killed launcher hold its lock for a moment while they clean up


class RunDirectory:
    """Owns a folder (mode 0700) for one run.

    Args:
        path: the folder; a new one in the temporary folder when `None`, which is removed at the end.

    Raises:
        ConfigError: the path is too long for sockets, not ours, not writable, or another run holds it.
    """

    def __init__(self, path: str | None = None) -> None:
        self._temporary = path is None
        self.keep = False  # set when the logs are still of use, after a failure
        if path is None:
            self.path = Path(tempfile.mkdtemp(prefix="omni-", dir=short_temporary_folder()))
        else:
            self.path = Path(path).expanduser().absolute()
        longest = len(os.fsencode(self.path)) + 1 + LONGEST_SOCKET_NAME
        if longest > MAX_IPC_PATH:
            raise ConfigError(
                f"The run directory {self.path} is too long: socket paths may have {MAX_IPC_PATH} bytes, "
                f"so it may have {MAX_IPC_PATH - LONGEST_SOCKET_NAME - 1}.",
                hint="Choose a shorter --run-dir.",
            )
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_private()
            self.logs.mkdir(exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise ConfigError(f"Cannot use the run directory {self.path}: {error.strerror}.") from error
        _sweep(self.path)  # what a killed run left behind; the lock says that nobody uses it

    @property
    def temporary(self) -> bool:
        """Whether the folder was made for this run alone."""
        return self._temporary

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def endpoint(self, name: str) -> str:
        """The ipc endpoint of a socket file called `name` here."""
        return f"ipc://{self.path / name}"

    def log_file(self, replica: str) -> Path:
        return self.logs / f"{replica.replace('/', '-')}.log"

    def _make_private(self) -> None:
        """Mode 0700, but never for a folder that others work in, like /tmp."""
        if self.path.stat().st_mode & 0o022:
            raise ConfigError(
                f"Others may write to the run directory {self.path}.", hint="Choose a folder of this pipeline's own."
            )
        self.path.chmod(0o700)

    def _take_lock(self) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while (lock := _try_lock(self.path, create=True)) is None:
            if time.monotonic() > deadline:
                owner = (self.path / LOCK).read_text().strip() or "unknown"
                raise ConfigError(
                    f"The run directory {self.path} is in use by process {owner}.",
                    hint="Stop that pipeline, or choose another --run-dir.",
                )
            time.sleep(0.02)
        self._lock = lock
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def close(self) -> None:
        """Remove sockets, and the whole folder if it was made for this run and nobody needs its logs. Idempotent."""
        if self._lock.closed:
            return
        if self._temporary and not self.keep:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            _sweep(self.path)
            (self.path / LOCK).unlink(missing_ok=True)
        self._lock.close()


def clear_abandoned(path: Path, temporary: bool) -> None:
    """Remove what a killed launcher left in its run directory. Does nothing while a launcher, or a new one, lives.

    Every stage process calls it at its end; the launcher's lock tells whether there is anything to do.
    """
    lock = _try_lock(path, create=False)
    if lock is None:
        return
    with lock:
        if temporary:
            shutil.rmtree(path, ignore_errors=True)
        else:
            _sweep(path)
            (path / LOCK).unlink(missing_ok=True)


def _try_lock(path: Path, create: bool) -> IO[str] | None:
    """The lock file, locked; `None` if another process holds it or, unless `create`, it is not there."""
    try:
        lock = open(path / LOCK, "a+" if create else "r+")  # noqa: SIM115 - held by the caller
    except FileNotFoundError:
        if create:
            raise
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its former holder may have removed the file between our opening and locking it.
        if os.fstat(lock.fileno()).st_ino == (path / LOCK).stat().st_ino:
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    lock.close()
    return None


def _sweep(path: Path) -> None:
    """Remove the sockets, those of the fork server included, and the stages' signs (stage/turns.py)."""
    for entry in path.iterdir():
        if entry.is_socket() or entry.name.startswith("turn-"):
            entry.unlink(missing_ok=True)
        elif entry.name.startswith("pymp-"):
            shutil.rmtree(entry, ignore_errors=True)


def short_temporary_folder() -> str:
    """TMPDIR unless it is too long for socket files, then /tmp."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + 16 + LONGEST_SOCKET_NAME <= MAX_IPC_PATH else "/tmp"
