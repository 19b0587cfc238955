"""The routes /v1/realtime/calls: sessions over WebRTC, each a task that outlives the request which began it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import ipaddress
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from omni_actors.http_server.bodies import FORM, FormBody, Strict, received
from omni_actors.http_server.errors import HttpError, bad_field
from omni_actors.http_server.realtime.config import parse
from omni_actors.http_server.realtime.connection import CallQuery, SessionConnection, asked_by, begun, new_session
from omni_actors.http_server.realtime.session import RealtimeSession
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.state import ServerState
from omni_actors.logs import get_logger

if TYPE_CHECKING:
    from omni_actors.http_server.realtime.webrtc import Call

logger = get_logger(__name__)

PATH = "/v1/realtime/calls"
SDP = "application/sdp"
MAX_SDP = 64 << 10


class Offer(Strict, frozen=True):
    """What a client sends to begin a call.

    Args:
        session: JSON of the `session` of `session.update`.
    """

    sdp: str
    session: str | None = None


class OfferBody:
    """An offer alone, or in a form with the session's configuration."""

    kind = Offer
    form = FormBody(Offer, {}, {}, None)

    async def read(self, request: Request, settings: ServerSettings) -> Offer:
        """Receive the body. Raises `HttpError` for the first thing that is wrong with it."""
        if request.headers.get("content-type", "").lower().startswith(FORM):
            offer = (await self.form.read(request, settings)).fields
        else:
            offer = Offer((await received(request, settings, SDP)).decode(errors="replace"))
        if len(offer.sdp) > MAX_SDP:
            raise bad_field("sdp", f"An SDP offer is limited to {MAX_SDP} characters.", "invalid_sdp")
        return offer

    def described(self) -> dict[str, Any]:
        """The OpenAPI `requestBody`."""
        body = self.form.described()
        body["content"][SDP] = {"schema": {"type": "string"}}
        return body


BODY = OfferBody()


def available() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("aiortc") is not None


async def create(request: Request, state: ServerState, offer: Offer, query: CallQuery) -> Response:
    """Begin a realtime session over WebRTC: answers an SDP offer, 201."""
    call = await new_call()
    asked = asked_by(request, query, state.settings.api_key)
    if offer.session is not None:
        asked |= parse(offer.session.encode(errors="surrogatepass"), dict[str, Any], "session")
    session = new_session(*begun(asked, state, await state.describe(), called=True), state)
    answer = await begin(call, offer.sdp, request, state, session)
    return Response(answer, 201, {"location": f"{PATH}/{call.id}"}, media_type=SDP)


async def new_call() -> Call:
    """A call that has not begun. Raises `HttpError` 404 without the extra."""
    if not available():
        message = "This server has no WebRTC: install omni_actors[webrtc], or connect with a WebSocket."
        raise HttpError(404, message, code="not_found")
    webrtc = await asyncio.to_thread(importlib.import_module, "omni_actors.http_server.realtime.webrtc")
    call: Call = webrtc.Call()
    return call


async def begin(call: Call, offer: str, request: Request, state: ServerState, session: RealtimeSession) -> str:
    """Begin a session over a call, which goes on after the request; returns the SDP answer. Raises `HttpError`."""
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(state.realtime.session(state.tenant(request), call))
        stack.push_async_callback(call.end)
        await state.realtime.load()
        answer = await call.answer(offer, _address(request))
        held = stack.pop_all()

    async def run() -> None:
        async with held:
            try:
                await call.connected()
                await SessionConnection(call, request, state, session).run()
            except (TimeoutError, OSError) as error:
                logger.info("call %s has not begun: %r", call.id, error, extra={"request_id": request.state.request_id})

    task = state.calls[call.id] = asyncio.create_task(run(), name="realtime call")
    task.add_done_callback(lambda _: state.calls.pop(call.id))
    return answer


def _address(request: Request) -> str:
    """The address of this host to which the request came, and to which the packets of its call are to come."""
    address = ipaddress.ip_address(request.scope["server"][0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


async def hang_up(request: Request, state: ServerState, call_id: str) -> Response:
    """End a call."""
    if (task := state.calls.get(call_id)) is None:
        message = f"This process has no call {call_id[:100]!r}: it has ended, or another process of the server has it."
        raise HttpError(404, message, param="call_id", code="call_not_found")
    task.cancel()
    await asyncio.wait((task,))
    return Response()
