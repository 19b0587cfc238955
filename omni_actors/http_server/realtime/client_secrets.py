"""Client secrets: keys for browsers and phones, which open realtime sessions for a while and do nothing else.

A secret says itself when it expires and how its sessions begin, and is signed with a key that follows from the API key.
So each process of a server knows those of the others, and none has to remember any.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import Headers

from omni_actors.http_server.bodies import JsonBody, Strict
from omni_actors.http_server.errors import bad_field

PREFIX = "ek_"
KEY_SUBPROTOCOL = "openai-insecure-api-key."  # as OpenAI's pages send it
ELEVENLABS_KEY = "xi-api-key"  # the header of ElevenLabs' clients
MAX_SESSION = 8 << 10  # bytes of a session in a secret, which is sent in a header
MEANING = b"omni_actors: client secrets of /v1/realtime"


class ExpiresAfter(Strict, frozen=True):
    """How long sessions can be begun."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=10, le=7200)] = 600


class SecretRequest(Strict, frozen=True):
    """Body of POST /v1/realtime/client_secrets."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None


BODY = JsonBody(SecretRequest, {})


class Secret(Struct):
    """What a secret holds: when it expires (Unix time), and the `session` of its sessions' first `session.update`."""

    expires: int
    session: dict[str, Any]


def sealed(secret: Secret, api_key: str | None) -> str:
    """The secret as clients send it. Raises `HttpError` 400 for a session that is too long for a header."""
    content = msgspec.json.encode(secret)
    if len(content) > MAX_SESSION:
        raise bad_field("session", f"The session of a client secret is limited to {MAX_SESSION} bytes.")
    text = base64.urlsafe_b64encode(content).rstrip(b"=")
    return f"{PREFIX}{text.decode()}.{_signature(text, api_key)}"


def opened(given: str, api_key: str | None) -> Secret | None:
    """A secret that a client has sent; `None` if it is none, is not of this server, or has expired."""
    text, _, signature = given.removeprefix(PREFIX).encode().partition(b".")
    if not given.startswith(PREFIX) or not hmac.compare_digest(_signature(text, api_key).encode(), signature):
        return None
    secret = msgspec.json.decode(base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4)), type=Secret)
    return secret if time.time() < secret.expires else None


def _signature(text: bytes, api_key: str | None) -> str:
    """Sign a secret. Without an API key the server is open anyway, so the signature protects nothing."""
    key = hmac.digest((api_key or "").encode(), MEANING, "sha256")
    return binascii.hexlify(hmac.digest(key, text, "sha256")).decode()


def key_of(headers: Headers) -> str:
    """The API key or client secret of a request, or of a browser's WebSocket, which can add no header. May be empty."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if given:
        return given.strip() if scheme.lower() == "bearer" else ""
    if ELEVENLABS_KEY in headers:
        return headers[ELEVENLABS_KEY]
    names = (name.strip() for name in headers.get("sec-websocket-protocol", "").split(","))
    return next((name.removeprefix(KEY_SUBPROTOCOL) for name in names if name.startswith(KEY_SUBPROTOCOL)), "")
