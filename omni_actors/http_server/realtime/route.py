"""The route /v1/realtime: what is checked before a session begins."""

from __future__ import annotations

import time

from starlette.websockets import WebSocket

from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.realtime.config import RATE, Pipeline, ServerVad, SessionConfig
from omni_actors.http_server.realtime.connection import SessionConnection
from omni_actors.http_server.realtime.session import RealtimeSession
from omni_actors.http_server.realtime.turns import AheadOfTurn
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.client import Description

SUBPROTOCOL = "realtime"  # that browsers ask for, besides the one that holds the key
PARAMETERS = frozenset({"model"})


async def realtime(websocket: WebSocket) -> None:
    """Converse, with OpenAI's realtime events. A refusal is a plain HTTP response."""
    state: ServerState = websocket.app.state.server
    description = await state.describe()
    model = _model(websocket, state, description)
    tenant = state.tenants.name(websocket.client.host if websocket.client is not None else "")
    with state.realtime.session(tenant) as reservation:
        await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in websocket.scope["subprotocols"] else None)
        session = _session(state, description, model)
        await SessionConnection(websocket, state, session, reservation, tenant).run()


def _model(websocket: WebSocket, state: ServerState, description: Description) -> str:
    for name in websocket.query_params:
        if name not in PARAMETERS:
            raise bad_field(name[:64], f"There is no parameter {name[:64]!r}; there is model.", "unknown_parameter")
    return state.model_name(websocket.query_params.get("model"), description)


def _hears(description: Description, pipeline: Pipeline) -> bool:
    """Whether the stage that answers reads the user's sound itself, and does not need all of it for that."""
    return description.outputs.get("text") in pipeline.stages[:2]


def _session(state: ServerState, description: Description, model: str) -> RealtimeSession:
    settings = state.settings
    pipeline = Pipeline(
        voices=description.voices,
        voice_aliases=settings.voice_aliases,
        stages=tuple(dict.fromkeys(status.stage for status in description.stages)),
        models=(*state.model_names(description), *description.adapters),
        speaks="audio" in description.modalities and description.sample_rate == RATE,
        max_audios=description.max_media.get("audio"),
    )
    config = SessionConfig(
        model=model,
        output="audio" if pipeline.speaks else "text",
        turn_detection=ServerVad() if state.realtime.detects else None,
    )
    return RealtimeSession(
        config,
        pipeline,
        detects=state.realtime.detects,
        audio_seconds=settings.audio_seconds,
        expires=int(time.time() + settings.realtime_session_seconds),
        ahead=AheadOfTurn(settings.realtime_ahead_seconds if _hears(description, pipeline) else 0.0),
    )
