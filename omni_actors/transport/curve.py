"""CURVE keys in a folder, and the door-keeper that asks for them (ADR 0016, 0019).

A pipeline has one pair of keys, which all of its processes on all nodes share, and any number of named clients with
pairs of their own. Who holds the pipeline's pair may be any stage; a client's opens the client endpoint and no other.
Some of the clients are operators: they may also change what runs.
By default libzmq accepts every key, and does without an authenticator: `ZapAuthenticator` and the options in
transport/sockets.py belong together.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth
from zmq.utils import z85

from omni_actors.errors import ConfigError
from omni_actors.logs import get_logger

logger = get_logger(__name__)

CLUSTER, CLIENT = "cluster", "client"  # names of key files
ALLOWED, OPERATORS, HANDED_OUT = "allowed", "operators", "clients"  # folders
PUBLIC, SECRET = ".key", ".key_secret"
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
MAKE_KEYS = "Make keys with `omni-actors keys DIR` and give `--keys DIR` (OMNI_ACTORS_KEYS)"

# Who may come in at a socket: the ZAP domain.
MEMBERS = "members"  # processes of the pipeline
EVERYONE = "everyone"  # these and the clients allowed
LOCAL = "local"  # whoever can open the socket file; only for endpoints that are one

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_FRAMES = 7  # version, request, domain, address, identity, mechanism, key
PEER_KEY = "Omni-Key"  # the property of a message under which libzmq tells the public key of its connection
REVOKED_SECONDS = 1.0  # after which a key whose file was deleted counts for nothing on a connection that stands


@dataclass(frozen=True)
class Keys:
    """What a process knows: the pipeline's public key and its own pair. Keys are Z85 text, 40 bytes."""

    folder: Path
    cluster: bytes
    public: bytes
    secret: bytes = field(repr=False)

    @property
    def is_member(self) -> bool:
        """Whether this is the pipeline's own pair, with which endpoints are bound."""
        return self.public == self.cluster


def load_keys(folder: str | Path | None) -> Keys | None:
    """The keys in a folder made by `make_cluster` (for nodes) or `make_client`; `None` for `None`.

    Raises:
        ConfigError: the folder or a secret in it can be read by others, or something is missing or broken.
    """
    if folder is None:
        return None
    folder = Path(folder).expanduser().absolute()
    if not zmq.has("curve"):
        raise ConfigError("This build of libzmq cannot encrypt.", hint="Install pyzmq from PyPI.")
    _check_private(folder, "folder")
    cluster = _read(folder / f"{CLUSTER}{PUBLIC}")[0]
    own = next((name for name in (CLUSTER, CLIENT) if (folder / f"{name}{SECRET}").exists()), None)
    if own is None:
        raise ConfigError(f"There is no secret key in {folder}.", hint=f"{MAKE_KEYS}.")
    path = folder / f"{own}{SECRET}"
    _check_private(path, "file")
    public, secret = _read(path)
    if secret is None or zmq.curve_public(secret) != public or (own == CLUSTER and public != cluster):
        raise ConfigError(f"{path} does not hold the secret of its public key.", hint="Copy the whole folder again.")
    return Keys(folder, cluster, public, secret)


def _check_private(path: Path, what: str) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"Cannot use the keys in {path}: {error.strerror}.", hint=f"{MAKE_KEYS}.") from error
    if what == "folder" and not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is no folder of keys.", hint=f"{MAKE_KEYS}.")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"Others may use the {what} {path} (mode {stat.S_IMODE(status.st_mode):04o}), so it keeps no secret.",
            hint=f"If nobody has read it: chmod -R go= {path}. Otherwise make new keys.",
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"The {what} {path} belongs to another user.", hint="Keys belong to who runs the process.")


def _read(path: Path) -> tuple[bytes, bytes | None]:
    """(public, secret); errors never carry what is in the file."""
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None and (len(key) != 40 or len(z85.decode(key)) != 32):
                raise ValueError(path)
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise ConfigError(f"Cannot read the key {path}: {reason}.", hint=f"{MAKE_KEYS}.") from error
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} holds no key.", hint="Copy the file again.") from error
    return public, secret


# ---------------------------------------------------------------------------------------------------------------------
# Making


def make_cluster(folder: Path) -> None:
    """A pipeline's pair in a new folder. Raises `ConfigError` if there is one already."""
    _make_folder(folder)
    _make_pair(folder, CLUSTER)
    _make_folder(folder / ALLOWED)


def make_client(folder: Path, name: str, operator: bool = False) -> Path:
    """Allow a client `name`, who may change what runs if it is an `operator`; the folder to hand to it.

    Raises:
        ConfigError: no such pipeline's folder, or the name is taken or not a plain one.
    """
    if not NAME.fullmatch(name) or name == CLUSTER:
        raise ConfigError(f"{name!r} is no name for a client.", hint="Use small letters, digits, '.', '_' and '-'.")
    keys = load_keys(folder)
    if keys is None or not keys.is_member:
        raise ConfigError(f"{folder} is a client's folder; only a pipeline's can allow clients.", hint=f"{MAKE_KEYS}.")
    handed = folder / HANDED_OUT / name
    allowed = folder / (OPERATORS if operator else ALLOWED) / f"{name}{PUBLIC}"
    for path in (handed, *(folder / place / f"{name}{PUBLIC}" for place in (ALLOWED, OPERATORS))):
        if path.exists():
            raise ConfigError(f"{path} exists already.", hint="Choose another name, or delete it first.")
    for path in (allowed.parent, handed.parent, handed):
        _make_folder(path)
    _make_pair(handed, CLIENT)
    _copy(folder / f"{CLUSTER}{PUBLIC}", handed / f"{CLUSTER}{PUBLIC}")
    _copy(handed / f"{CLIENT}{PUBLIC}", allowed)
    return handed


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make the folder {folder}: {error.strerror}.") from error
    _check_private(folder, "folder")


def _make_pair(folder: Path, name: str) -> None:
    """Nobody else gets at the files before their mode is set: the folder is closed to others."""
    if (folder / f"{name}{SECRET}").exists() or (folder / f"{name}{PUBLIC}").exists():
        raise ConfigError(f"There are keys in {folder} already.", hint="Nothing was changed. Choose a new folder.")
    for path in zmq.auth.create_certificates(folder, name):
        os.chmod(path, 0o600)


def _copy(source: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(source.read_bytes())


# ---------------------------------------------------------------------------------------------------------------------
# Asking for them


class KeyOwner(NamedTuple):
    """Who is at the other end of a connection. The default: whoever can open the endpoint, as there are no keys."""

    name: str = ""
    may_operate: bool = True


class AllowList:
    """The clients allowed now. Read again at every question: to delete a client's file is to lock it out."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._broken: set[Path] = set()

    def owners(self) -> dict[bytes, KeyOwner]:
        """Who may come in, by public key (Z85)."""
        found = {self._keys.cluster: KeyOwner(CLUSTER)}
        for folder in (OPERATORS, ALLOWED):
            for path in sorted((self._keys.folder / folder).glob(f"*{PUBLIC}")):
                try:
                    found.setdefault(_read(path)[0], KeyOwner(path.stem, folder == OPERATORS))
                except ConfigError as error:  # one broken file locks out one client
                    if path not in self._broken:
                        logger.warning("a key is left out: %s", error)
                    self._broken.add(path)
        return found

    def name_of(self, domain: str, key: bytes) -> str | None:
        """Who owns the public `key` (Z85), if that one may come in at a socket of this `domain`."""
        if key == self._keys.cluster:
            return CLUSTER
        owner = self.owners().get(key) if domain == EVERYONE else None
        return owner.name if owner is not None else None


class KeyOwners:
    """Who sends a message, asked for each: the files are read at most once in `REVOKED_SECONDS` for each key.

    Args:
        keys: `None` for a pipeline without; then everybody is somebody.
    """

    def __init__(self, keys: Keys | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowed = AllowList(keys) if keys is not None else None
        self._clock = clock
        self._known: dict[bytes, KeyOwner | None] = {}
        self._outdated = 0.0

    def of(self, key: bytes) -> KeyOwner | None:
        """The owner of a connection's `key`, b"" for a connection without; `None`: it is not allowed any more."""
        if not key or self._allowed is None:
            return KeyOwner()
        now = self._clock()
        if now >= self._outdated:
            self._known.clear()
            self._outdated = now + REVOKED_SECONDS
        if key not in self._known:
            self._known[key] = self._allowed.owners().get(key)
        return self._known[key]


class ZapAuthenticator(threading.Thread):
    """Answers libzmq's questions (ZAP, RFC 27) whether a peer's key may come in; lives as long as its context.

    pyzmq's own authenticators need to be stopped before the context is terminated, by the thread that started them, and
    an event loop in every stage. This one ends when the context does.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        super().__init__(name="doorkeeper", daemon=True)
        self._allowed = AllowList(keys)
        # A shadow: whoever destroys the context closes the sockets he made, not this one under our feet.
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)  # before the first endpoint is: nobody is turned away because we are late

    def run(self) -> None:
        try:
            while True:
                request = self._socket.recv_multipart()
                self._socket.send_multipart(self._answer(request))
        except zmq.ContextTerminated:
            pass  # the end that is meant
        except zmq.ZMQError:
            logger.exception("the doorkeeper failed: from now on nobody is let in")
        finally:
            self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one question; whatever goes wrong is a no."""
        number = request[1] if len(request) > 1 else b""
        refusal = [ZAP_VERSION, number, b"400", b"No access", b"", b""]
        if request[2:3] == [LOCAL.encode()] and request[5:] == [b"NULL"]:
            return [ZAP_VERSION, number, b"200", b"OK", b"", b""]
        if len(request) != ZAP_FRAMES or request[0] != ZAP_VERSION or request[5] != b"CURVE":
            return refusal
        domain, address = (frame.decode(errors="replace") for frame in request[2:4])
        try:
            key = z85.encode(request[6])
            name = self._allowed.name_of(domain, key)
        except Exception:
            logger.exception("the allow-list cannot be read; %s is refused", address)
            return refusal
        if name is None:
            logger.warning("refused a peer at %s: its key is not allowed here", address)
            return refusal
        logger.debug("%s is let in from %s", name, address)
        # Without the name as a user id: libzmq puts one in front of the connection's messages, where it makes a socket
        # readable that has nothing to read. A property comes with each message.
        return [ZAP_VERSION, number, b"200", b"OK", b"", _property(PEER_KEY, key)]


def _property(name: str, value: bytes) -> bytes:
    """One property as ZMTP writes it."""
    return len(name).to_bytes(1, "big") + name.encode() + len(value).to_bytes(4, "big") + value
