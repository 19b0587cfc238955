"""The run directory: the one place for a pipeline's socket files, logs and lock. Swept at start, cleared at exit."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from omni_actors.errors import ConfigError

MAX_IPC_PATH = 107  # bytes that a Unix socket address can hold
LONGEST_SOCKET_NAME = 60


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
            self.path = Path(tempfile.mkdtemp(prefix="omni-", dir=_short_temporary_folder()))
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
            self.path.chmod(0o700)
            self.logs.mkdir(exist_ok=True)
            self._lock = open(self.path / "lock", "a+")  # noqa: SIM115 - held for the life of the run
        except OSError as error:
            raise ConfigError(f"Cannot use the run directory {self.path}: {error.strerror}.") from error
        self._take_lock()
        self._sweep()

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def endpoint(self, name: str) -> str:
        """The ipc endpoint of a socket file called `name` here."""
        return f"ipc://{self.path / name}"

    def log_file(self, replica: str) -> Path:
        return self.logs / f"{replica.replace('/', '-')}.log"

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise ConfigError(
                f"The run directory {self.path} is in use by process {owner}.",
                hint="Stop that pipeline, or choose another --run-dir.",
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def _sweep(self) -> None:
        """Remove the sockets that a killed run left behind; the lock says that nobody uses them."""
        for entry in self.path.iterdir():
            if entry.is_socket():
                entry.unlink()

    def close(self) -> None:
        """Remove sockets, and the whole folder if it was made for this run and nobody needs its logs. Idempotent."""
        if self._lock.closed:
            return
        if self._temporary and not self.keep:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self._sweep()
            with contextlib.suppress(FileNotFoundError):
                (self.path / "lock").unlink()
        self._lock.close()


def _short_temporary_folder() -> str | None:
    """TMPDIR unless it is too long for socket files, then /tmp."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + 16 + LONGEST_SOCKET_NAME <= MAX_IPC_PATH else "/tmp"
