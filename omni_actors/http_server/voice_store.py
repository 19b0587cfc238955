"""The voices that clients have made of recordings: one file each, in a folder that several servers may share.

A file has a line of JSON, then the samples. It is written under another name and then renamed, so readers see all of it
or nothing. Its name is the voice's id, which follows from the voice's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy
from msgspec import Struct

from omni_actors.errors import ConfigError
from omni_actors.host.paths import check_own_folder, expanded
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.logs import get_logger

logger = get_logger(__name__)

SUFFIX = ".voice"
MAX_HEAD = 64 << 10
ID = "voice_"
ID_BYTES = 12


class Voice(Struct, frozen=True, forbid_unknown_fields=True):
    """A voice without its recording.

    Args:
        created: Unix time.
        rate: of the recording, in Hz.
        samples: their number.
        transcript: what is said in the recording, if the client knows it.
    """

    name: str
    created: int
    rate: int
    samples: int
    transcript: str | None = None

    @property
    def id(self) -> str:
        """The id of the voice, which depends on nothing but its name in lower case."""
        return id_of(self.name)

    @property
    def seconds(self) -> float:
        """Length of the recording."""
        return self.samples / self.rate


def id_of(name: str) -> str:
    """The id of the voice that has this name, in any case."""
    digest = hashlib.blake2b(name.casefold().encode(errors="surrogatepass"), digest_size=ID_BYTES)
    return f"{ID}{digest.hexdigest()}"


class VoiceStore:
    """Reads and writes voices. Its methods use files; call them on threads.

    Args:
        folder: where the voices are, made with the first of them; `None` if this server keeps none.
        most: how many there may be.

    """

    def __init__(self, folder: str | None, most: int) -> None:
        self._folder = expanded(folder, "http.voices_dir") if folder is not None else None
        self._most = most
        self._damaged: set[Path] = set()  # those that the log has named

    def all(self) -> list[Voice]:
        """All voices, by name."""
        if self._folder is None or not self._folder.is_dir():
            return []
        found = (self._head(path) for path in self._folder.glob(f"*{SUFFIX}"))
        return sorted((voice for voice in found if voice is not None), key=lambda voice: voice.name)

    def find(self, name: str) -> Voice | None:
        """The voice with this name, in any case, or with this id."""
        return next(filter(None, map(self._head, self._paths(name))), None)

    def samples(self, voice: Voice) -> numpy.ndarray:
        """The recording: f32 [samples], mono. Raises `HttpError` 404 if another server has just deleted it."""
        (path,) = self._paths(voice.id)
        try:
            with _opened(path) as file:
                data = file.read()
        except FileNotFoundError:
            raise no_voice(voice.name) from None
        return numpy.frombuffer(data[data.index(b"\n") + 1 :], numpy.float32)

    def add(self, voice: Voice, samples: numpy.ndarray) -> None:
        """Keep a voice with its recording.

        Raises:
            HttpError: 400 if the name is taken, 400 if there are too many, 500 if others may write to the folder, 507
                if it cannot be written.
        """
        if self._folder is None:
            message = "This server keeps no voices: its operator must name a folder with --http-voices-dir."
            raise HttpError(400, message, code="unsupported_parameter")
        path = self._folder / f"{voice.id}{SUFFIX}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_own_folder(self._folder, "The folder of voices")
            with _lock(self._folder):
                if self._head(path) is not None:
                    raise bad_field("name", f"There is a voice {voice.name!r}: choose another name, or delete it.")
                if len(self.all()) >= self._most:
                    message = f"There are {self._most} voices, as many as this server keeps: delete one."
                    raise bad_field("name", message, "too_many_voices")
                file, draft = tempfile.mkstemp(dir=self._folder)  # a new file, which follows no link
                try:
                    with open(file, "wb") as stream:
                        stream.write(msgspec.json.encode(voice) + b"\n" + samples.astype(numpy.float32).tobytes())
                        stream.flush()
                        os.fsync(file)
                    os.rename(draft, path)
                except BaseException:
                    os.unlink(draft)
                    raise
        except OSError as error:
            logger.error("cannot write a voice to %s: %s", self._folder, error)
            message = f"The server cannot write the voice: {error.strerror}. Its operator must make room for it."
            raise HttpError(507, message, code="internal_error") from error
        except ConfigError as error:
            logger.error("cannot keep a voice: %s", error)
            message = "The server cannot keep the voice: its operator must give it another folder, as its log says."
            raise HttpError(500, message, code="internal_error") from error

    def remove(self, name: str) -> Voice | None:
        """Delete the voice with this name or id, and return it; `None` if there is none."""
        voice = self.find(name)
        for path in self._paths(voice.id) if voice is not None else ():
            path.unlink(missing_ok=True)
        return voice

    def _paths(self, name: str) -> list[Path]:
        if self._folder is None:
            return []
        ids = [id_of(name)]
        if name.startswith(ID) and len(name) == len(ids[0]) and name.removeprefix(ID).isalnum() and name.isascii():
            ids = [name, *ids] if name != ids[0] else ids
        return [path for each in ids if (path := self._folder / f"{each}{SUFFIX}").exists()]

    def _head(self, path: Path) -> Voice | None:
        try:
            with _opened(path) as file:
                voice = msgspec.json.decode(file.readline(MAX_HEAD), type=Voice)
                if file.tell() + 4 * voice.samples == os.fstat(file.fileno()).st_size and voice.rate > 0:
                    return voice
            reason = "it has another length than it says"
        except FileNotFoundError:
            return None  # deleted since the folder was read
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            reason = str(error)
        if path not in self._damaged:
            self._damaged.add(path)
            logger.error("%s is not a voice and is left out: %s", path, reason)
        return None


def _opened(path: Path) -> BinaryIO:
    """Open a regular file, without following a link to it or waiting for the other end of a pipe. Raises `OSError`."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is not a regular file")
    return file


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other servers from adding voices meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def no_voice(name: str) -> HttpError:
    """The refusal of a voice that is not there."""
    message = f"There is no voice {name[:100]!r} that a client has made; GET /v1/audio/voices lists those there are."
    return HttpError(404, message, param="voice", code="voice_not_found")
