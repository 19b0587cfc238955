"""CURVE keys and ZAP: load and make key files, and check whose key may connect where.

A pipeline has one pair of keys, which all its processes on all nodes share, and any number of named clients with pairs
of their own. A process with the pipeline's pair may be any stage; a client's pair opens only the client endpoint. Some
clients are operators, who may also change what runs.

A pipeline's folder:
    cluster.key, cluster.key_secret     the pipeline's pair
    allowed/NAME.key                    public keys of the clients that may connect
    operators/NAME.key                  public keys of the clients that may also operate
    clients/NAME/                       folders to hand to the clients: cluster.key, client.key, client.key_secret

libzmq accepts every key unless an authenticator answers it, and works without one by default: `ZapAuthenticator` and
the options that `transport/sockets.py` sets belong together.
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
from omni_actors.host.run_directory import expanded
from omni_actors.logs import get_logger

logger = get_logger(__name__)

CLUSTER, CLIENT = "cluster", "client"
ALLOWED, OPERATORS, CLIENTS = "allowed", "operators", "clients"
PUBLIC, SECRET = ".key", ".key_secret"
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
MAKE_KEYS = "Make keys with `omni-actors keys DIR` and give `--keys DIR` (OMNI_ACTORS_KEYS)"


@dataclass(frozen=True)
class Keys:
    """The pipeline's public key and this process's own pair, each as 40 bytes of Z85 text."""

    folder: Path
    cluster: bytes
    public: bytes
    secret: bytes = field(repr=False)

    @property
    def is_member(self) -> bool:
        """Whether this is the pipeline's own pair, which is needed to bind endpoints."""
        return self.public == self.cluster


def load_keys(folder: str | Path | None) -> Keys | None:
    """Load the keys of a pipeline or a client from their folder; `None` for `None`.

    Raises:
        ConfigError: others can read the folder or its secret, or something is missing or broken.
    """
    if folder is None:
        return None
    folder = expanded(folder, "keys")
    if not zmq.has("curve"):
        raise ConfigError("This build of libzmq cannot encrypt.", hint="Install pyzmq from PyPI.")
    _check_private(folder, "folder")
    cluster, _ = read_key(folder / f"{CLUSTER}{PUBLIC}")
    own = next((name for name in (CLUSTER, CLIENT) if (folder / f"{name}{SECRET}").exists()), None)
    if own is None:
        raise ConfigError(f"There is no secret key in {folder}.", hint=f"{MAKE_KEYS}.")
    path = folder / f"{own}{SECRET}"
    _check_private(path, "file")
    public, secret = read_key(path)
    if secret is None or zmq.curve_public(secret) != public or (own == CLUSTER and public != cluster):
        raise ConfigError(f"{path} does not hold the secret of its public key.", hint="Copy the whole folder again.")
    return Keys(folder, cluster, public, secret)


def read_key(path: Path) -> tuple[bytes, bytes | None]:
    """Return the public key and, if the file holds it, the secret one. Errors never show what is in the file."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"Cannot read the key {path}: it is not a regular file.", hint=f"{MAKE_KEYS}.")
    try:
        public, secret = zmq.auth.load_certificate(path)
        for key in (public, secret):
            if key is not None and (len(key) != 40 or len(z85.decode(key)) != 32):
                raise ValueError(path)
    except OSError as error:
        reason = error.strerror or "it cannot be read"
        raise ConfigError(f"Cannot read the key {path}: {reason}.", hint=f"{MAKE_KEYS}.") from error
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} holds no valid key.", hint="Copy the file again.") from error
    return public, secret


def make_cluster(folder: Path) -> None:
    """Make a pipeline's pair in a new folder.

    Raises:
        ConfigError: the folder holds keys already, cannot be made, or is open to others.
    """
    _make_folder(folder)
    _make_pair(folder, CLUSTER)
    _make_folder(folder / ALLOWED)


def make_client(folder: Path, name: str, operator: bool = False) -> Path:
    """Allow a client called `name`, as an operator if asked, and return the folder to hand to it.

    Raises:
        ConfigError: `folder` is not a pipeline's, or the name is taken or has other characters than names may have.
    """
    if not NAME.fullmatch(name) or name == CLUSTER:
        raise ConfigError(f"{name!r} is not a valid name.", hint="Use small letters, digits, '.', '_' and '-'.")
    keys = load_keys(folder)
    if keys is None or not keys.is_member:
        raise ConfigError(
            f"{folder} is a client's folder; only the pipeline's own can allow clients.", hint=f"{MAKE_KEYS}."
        )
    handed = folder / CLIENTS / name
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


def _check_private(path: Path, what: str) -> None:
    """Raise `ConfigError` unless only this user can use a `what` ("folder" or "file")."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"Cannot use the keys in {path}: {error.strerror}.", hint=f"{MAKE_KEYS}.") from error
    if what == "folder" and not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a folder of keys.", hint=f"{MAKE_KEYS}.")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"Others may use the {what} {path} (mode {stat.S_IMODE(status.st_mode):04o}), so it cannot keep a secret.",
            hint=f"If no one has read it: chmod -R go= {path}. Otherwise make new keys.",
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"The {what} {path} belongs to another user.", hint="Keys must belong to the user who runs the process."
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot make the folder {folder}: {error.strerror}.") from error
    _check_private(folder, "folder")


def _make_pair(folder: Path, name: str) -> None:
    if (folder / f"{name}{SECRET}").exists() or (folder / f"{name}{PUBLIC}").exists():
        raise ConfigError(f"There are keys in {folder} already.", hint="Nothing was changed. Choose a new folder.")
    for path in zmq.auth.create_certificates(folder, name):  # in a folder that is closed to others
        os.chmod(path, 0o600)


def _copy(source: Path, target: Path) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(source.read_bytes())


# ZAP domains: who may connect to a socket.
MEMBERS = "members"  # the pipeline's processes
EVERYONE = "everyone"  # those and the allowed clients
LOCAL = "local"  # every process that can open the socket file; only for ipc:// endpoints

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
ZAP_FRAMES = 7  # version, request, domain, address, identity, mechanism, key
PEER_KEY = "Omni-Key"  # property of a message in which libzmq gives the public key of its connection
REVOKED_SECONDS = 1.0  # after which a key whose file was deleted has no rights on an open connection


class KeyOwner(NamedTuple):
    """The peer of a connection. The default stands for a connection without keys, whose peer may do everything."""

    name: str = ""
    may_operate: bool = True


@dataclass(eq=False)
class KeyOwners:
    """Finds the owner of a public key (Z85). Deleting a client's file locks it out.

    Args:
        keys: `None` for a pipeline without keys; then every peer may do everything.
    """

    keys: Keys | None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._known: dict[bytes, KeyOwner | None] = {}
        self._outdated = 0.0
        self._broken: set[Path] = set()

    def read(self, keys: Keys) -> dict[bytes, KeyOwner]:
        """Read from the files who may connect now."""
        found = {keys.cluster: KeyOwner(CLUSTER)}
        for folder in (OPERATORS, ALLOWED):
            for path in sorted((keys.folder / folder).glob(f"*{PUBLIC}")):
                try:
                    found.setdefault(read_key(path)[0], KeyOwner(path.stem, folder == OPERATORS))
                except ConfigError as error:  # one broken file locks out one client
                    if path not in self._broken:
                        logger.warning("ignored a client's key: %s", error)
                    self._broken.add(path)
        return found

    def of(self, key: bytes) -> KeyOwner | None:
        """Return the owner of a connection's `key` (b"": no keys), or `None` if it is no longer allowed.

        The files are read at most once in `REVOKED_SECONDS` for each key.
        """
        if not key or self.keys is None:
            return KeyOwner()
        now = self.clock()
        if now >= self._outdated:
            self._known.clear()
            self._outdated = now + REVOKED_SECONDS
        if key not in self._known:
            self._known[key] = self.read(self.keys).get(key)
        return self._known[key]


class ZapAuthenticator(threading.Thread):
    """Answers libzmq's questions whether a peer's key may connect, for as long as its context exists.

    pyzmq's own authenticators must be stopped before the context is terminated, by the thread that started them, or
    need an event loop. This one ends with the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        super().__init__(name="zap authenticator", daemon=True)
        self._keys = keys
        self._owners = KeyOwners(keys)
        # From a shadow context: destroying the context closes the sockets made from it, while this thread uses its own.
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)  # before any endpoint: no peer is refused for lack of an answer

    def run(self) -> None:
        """Answer questions until the context ends. Called by `Thread.start`."""
        try:
            while True:
                self._socket.send_multipart(self.answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass  # the intended end
        except zmq.ZMQError:
            logger.exception("the authenticator failed; all new TCP connections will be refused")
        finally:
            self._socket.close()

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Return the reply to one question. Anything malformed or unexpected is refused."""
        number = request[1] if len(request) > 1 else b""
        refusal = [ZAP_VERSION, number, b"400", b"No access", b"", b""]
        if request[2:3] == [LOCAL.encode()] and request[5:] == [b"NULL"]:
            return [ZAP_VERSION, number, b"200", b"OK", b"", b""]
        if len(request) != ZAP_FRAMES or request[0] != ZAP_VERSION or request[5] != b"CURVE":
            return refusal
        domain, address = (frame.decode(errors="replace") for frame in request[2:4])
        try:
            key = z85.encode(request[6])
            if key == self._keys.cluster:
                owner: KeyOwner | None = KeyOwner(CLUSTER)
            else:
                owner = self._owners.read(self._keys).get(key) if domain == EVERYONE else None
        except Exception:  # the thread has to go on answering: without it no peer could connect
            logger.exception("cannot read the allowed keys; refused a peer at %s", address)
            return refusal
        if owner is None:
            logger.warning("refused a peer at %s: its key is not allowed here", address)
            return refusal
        logger.debug("accepted %s from %s", owner.name, address)
        # The user id (the fifth frame) stays empty: libzmq would put it in front of the connection's messages, where it
        # makes a socket readable that has nothing to read. A property comes with each message instead.
        return [ZAP_VERSION, number, b"200", b"OK", b"", _property(PEER_KEY, key)]


def _property(name: str, value: bytes) -> bytes:
    """Encode one property as ZMTP does."""
    return len(name).to_bytes(1, "big") + name.encode() + len(value).to_bytes(4, "big") + value
