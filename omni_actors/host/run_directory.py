"""The run directory of a pipeline, paths in it, and how commands find running pipelines."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import psutil

from omni_actors.errors import ConfigError
from omni_actors.host import segments

logger = logging.getLogger(__name__)


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
        shown = f"{name}" if len(str(name)) <= 80 else f"{str(name)[:80]}..."
        raise ConfigError(f"{where}: {shown!r} cannot be a path: {error.strerror}.") from error
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


MAX_IPC_PATH = 107  # bytes that a Unix socket address can hold
LONGEST_SOCKET_NAME = 60
LOCK = "lock"
LOCK_SECONDS = 0.5  # the stages of a killed launcher hold its lock for a moment while they clean up
TOUCH_SECONDS = 3600.0  # between two touches of all files, which cleaners of /tmp remove once they are days old
SEGMENTS = "segments"  # list of the shared memory that the replicas hold (segments.py)
SCRATCH_PREFIX = "scratch-"  # of the folders with temporary files of engines that leave some (`scratch_folder`)
FORK_SERVER_PREFIX = "pymp-"  # of the folder that multiprocessing makes for its fork server's socket
FLEET = "fleet.json"  # what a restarted coordinator must know (coordinator/shell.py)
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
            self._link = add(self.path)
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
                forget(self._link)
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
            remove(path)
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
    remove(path)
    for entry in path.iterdir():
        if entry.is_socket() or entry.name in (RUNNING, FLEET):
            entry.unlink(missing_ok=True)
        elif entry.name.startswith((FORK_SERVER_PREFIX, MPS_PREFIX, SCRATCH_PREFIX)):
            shutil.rmtree(entry, ignore_errors=True)


def running() -> list[Running]:
    """This user's pipelines on this host. Forgets those whose launcher has ended."""
    found = []
    for link, path in entries():
        try:
            pipeline = msgspec.json.decode((path / RUNNING).read_bytes(), type=Running)
        except (OSError, msgspec.DecodeError):  # it has ended, and its folder with it
            forget(link)
            continue
        if psutil.pid_exists(pipeline.pid):
            found.append(pipeline)
        else:
            forget(link)
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
