"""The run directory: holds all socket files and logs of a pipeline on one host. Swept at start, cleared at exit."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

import msgspec
import psutil

from omni_actors.errors import ConfigError
from omni_actors.host import registry, segments
from omni_actors.host.paths import check_folder_can_be_made, check_own_folder, expanded

logger = logging.getLogger(__name__)

MAX_IPC_PATH = 107  # bytes that a Unix socket address can hold
LONGEST_SOCKET_NAME = 60
LOCK = "lock"
LOCK_SECONDS = 0.5  # the stages of a killed launcher hold its lock for a moment while they clean up
TOUCH_SECONDS = 3600.0  # between two touches of all files, which cleaners of /tmp remove once they are days old
DEMAND_PREFIX = "demand-"  # of the stages' demand flags (stage/device_priority.py)
SEGMENTS = "segments"  # list of the shared memory that the replicas hold (segments.py)
SCRATCH_PREFIX = "scratch-"  # of the folders with temporary files of engines that leave some (`scratch_folder`)
FORK_SERVER_PREFIX = "pymp-"  # of the folder that multiprocessing makes for its fork server's socket
FLEET = "fleet.json"  # what a restarted coordinator must know (coordinator/memory_file.py)
RUNNING = "pipeline.json"  # who runs here, for the commands that look for a pipeline
MPS_PREFIX = "mps-"  # of the folder with the pipes of an MPS daemon (launcher/mps.py)


class Running(msgspec.Struct, frozen=True):
    """A pipeline that runs on this host.

    Args:
        pid: of its launcher.
        keys: the folder of its CURVE keys, if it has any.
    """

    name: str
    endpoint: str
    pid: int
    keys: str | None = None


class RunDirectory:
    """Owns a folder (mode 0700) for one run.

    Args:
        path: the folder. `None` makes a new one in the system's temporary folder and removes it at the end.

    Raises:
        ConfigError: the path is too long for sockets, the folder is not ours or not writable, or another run holds it.
    """

    def __init__(self, path: str | None = None) -> None:
        self.temporary = path is None  # whether the folder was made for this run alone
        self.keep = False  # set after a failure, whose logs are still useful
        self._fork_server_files: set[Path] = set()
        self._next_touch = 0.0
        self._link: Path | None = None
        try:
            if path is None:
                self.path = Path(tempfile.mkdtemp(prefix="omni-", dir=short_temporary_folder()))
            else:
                self.path = check_run_directory(path)
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own_folder(self.path, "The run directory")
            self.path.chmod(0o700)
            self.logs.mkdir(exist_ok=True)
            self._take_lock()
            self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            where = path or error.filename or short_temporary_folder()
            raise ConfigError(f"Cannot use the run directory {where}: {error.strerror}.") from error
        _sweep(self.path)  # what a killed run left behind: we hold the lock, so no one uses it

    @property
    def logs(self) -> Path:
        """The folder for the logs of replicas."""
        return self.path / "logs"

    @property
    def voices(self) -> Path:
        """The folder for the voices that HTTP clients make, which the next run in this folder finds again."""
        return self.path / "voices"

    @property
    def segments(self) -> Path:
        """File with the list of the shared memory that the replicas hold."""
        return self.path / SEGMENTS

    def endpoint(self, name: str) -> str:
        """Return the ipc endpoint of a socket file called `name` in this folder."""
        return f"ipc://{self.path / name}"

    def log_file(self, replica: str) -> Path:
        """Path of the log of a replica, named as talker/0."""
        return self.logs / f"{replica.replace('/', '-')}.log"

    def _take_lock(self) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
        while (lock := _try_lock(self.path)) is None:
            if time.monotonic() > deadline:
                owner = (self.path / LOCK).read_text().strip() or "unknown"
                raise ConfigError(
                    f"The run directory {self.path} is in use by process {owner}.",
                    hint="Stop that pipeline, or choose another --run-dir.",
                )
            time.sleep(0.02)
        self._own(lock)

    def _own(self, lock: IO[str]) -> None:
        self._lock = lock
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def announce(self, name: str, endpoint: str, keys: str | None) -> None:
        """Let `running` find this pipeline."""
        try:
            (self.path / RUNNING).write_bytes(msgspec.json.encode(Running(name, endpoint, os.getpid(), keys)))
            self._link = registry.add(self.path)
        except OSError as error:
            logger.warning("commands have to be given the endpoint, as the pipeline cannot be listed: %s", error)

    def look(self) -> str:
        """Restore what others have removed, as far as possible; return what is lost for good, "" if nothing is.

        Call it every second or so. Socket files are restored by the processes that bind them.
        """
        if not self._is_there():
            return f"The run directory {self.path} was removed while the pipeline ran."
        if not _is_file(self._lock, self.path / LOCK):
            logger.warning("the lock of the run directory was removed; taking it again")
            lock = _try_lock(self.path)
            if lock is None:
                return f"Another process has taken the run directory {self.path}."
            self._lock.close()
            self._own(lock)
        self.logs.mkdir(exist_ok=True)
        found = set(self.path.glob(f"{FORK_SERVER_PREFIX}*/*"))
        if self._fork_server_files - found:
            return f"The socket of the fork server in {self.path} was removed; no stage can be restarted without it."
        self._fork_server_files = found
        if time.monotonic() >= self._next_touch:
            self._next_touch = time.monotonic() + TOUCH_SECONDS
            self._protect()
        return ""

    def _protect(self) -> None:
        """Keep cleaners of temporary folders off: systemd-tmpfiles by a lock of the folder, others by new times."""
        with contextlib.suppress(OSError):  # locked by a cleaner just now, or on a file system that locks no folders
            fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        for path in (self.path, *self.path.rglob("*")):
            with contextlib.suppress(OSError):  # removed meanwhile
                os.utime(path, follow_symlinks=False)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._folder))
        except OSError:
            return False

    def expect_removal(self, folder: str) -> None:
        """Have a folder in this one exist: multiprocessing fails to remove its own if others have done so."""
        with contextlib.suppress(OSError):
            self.path.mkdir(mode=0o700, exist_ok=True)
            Path(folder).mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Remove the sockets, or the whole folder if it is temporary and its logs are not worth keeping. Idempotent."""
        if self._lock.closed:
            return
        if self._is_there():
            _clear(self._lock, self.path, everything=self.temporary and not self.keep)
        else:
            if self._link is not None:
                registry.forget(self._link)
            with contextlib.suppress(OSError):  # what `expect_removal` made
                self.path.rmdir()
        self._lock.close()
        os.close(self._folder)


def check_run_directory(path: str) -> Path:
    """Return the folder's absolute path. Raises `ConfigError` if it cannot hold sockets or be written to."""
    folder = expanded(path, "coordinator.run_dir")
    longest = len(os.fsencode(folder)) + 1 + LONGEST_SOCKET_NAME
    if longest > MAX_IPC_PATH:
        raise ConfigError(
            f"The run directory {folder} is too long: socket paths may have {MAX_IPC_PATH} bytes, "
            f"so it may have {MAX_IPC_PATH - LONGEST_SOCKET_NAME - 1}.",
            hint="Choose a shorter --run-dir.",
        )
    check_folder_can_be_made(folder, "coordinator.run_dir")
    if folder.exists():
        check_own_folder(folder, "The run directory")
    return folder


def clear_abandoned(path: Path, temporary: bool) -> None:
    """Remove what a launcher that is gone left in its run directory: all of it if it was killed, else late sockets.

    Every stage process calls it at its end, also one that a stopping launcher no longer knew. Does nothing while that
    launcher, or a newer one, holds the lock.
    """
    try:
        lock = _try_lock(path)
    except OSError:  # the folder has been removed
        return
    if lock is not None:
        lock.seek(0)
        killed = bool(lock.read())  # an orderly end removes the file with its owner's number
        _clear(lock, path, everything=temporary and killed)


def _clear(lock: IO[str], path: Path, everything: bool) -> None:
    with lock:
        if everything:
            segments.remove_listed(path / SEGMENTS)
            registry.remove(path)
            # Under another name first, or a process that ends now would make its lock file in a half-empty folder.
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.gone")), ignore_errors=True)
        else:
            _sweep(path)
            (path / LOCK).unlink(missing_ok=True)


def _try_lock(path: Path) -> IO[str] | None:
    """Open and lock the lock file, made where it is missing; `None` if another process holds it."""
    lock = open(path / LOCK, "a+")  # noqa: SIM115 - held by the caller
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    # Its last holder may have removed the file between our opening and our locking it.
    if _is_file(lock, path / LOCK):
        return lock
    lock.close()
    return None


def _is_file(file: IO[str], path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sweep(path: Path) -> None:
    """Remove sockets, also those of the fork server and of MPS, the stages' files, and shared memory that is listed."""
    segments.remove_listed(path / SEGMENTS)
    registry.remove(path)
    for entry in path.iterdir():
        if entry.is_socket() or entry.name in (RUNNING, FLEET) or entry.name.startswith(DEMAND_PREFIX):
            entry.unlink(missing_ok=True)
        elif entry.name.startswith((FORK_SERVER_PREFIX, MPS_PREFIX, SCRATCH_PREFIX)):
            shutil.rmtree(entry, ignore_errors=True)


def running() -> list[Running]:
    """This user's pipelines on this host. Forgets those whose launcher has ended."""
    found = []
    for link, path in registry.entries():
        try:
            pipeline = msgspec.json.decode((path / RUNNING).read_bytes(), type=Running)
        except (OSError, msgspec.DecodeError):  # it has ended, and its folder with it
            registry.forget(link)
            continue
        if psutil.pid_exists(pipeline.pid):
            found.append(pipeline)
        else:
            registry.forget(link)
    return found


def scratch_folder(path: Path, replica: str) -> Path:
    """Make an empty folder for temporary files in the run directory, in place of the one of the replica's last life."""
    folder = path / f"{SCRATCH_PREFIX}{replica.replace('/', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def short_temporary_folder() -> str:
    """Return TMPDIR, or /tmp if that is too long for socket files."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + 16 + LONGEST_SOCKET_NAME <= MAX_IPC_PATH else "/tmp"
