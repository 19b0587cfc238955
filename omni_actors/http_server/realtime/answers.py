"""Asks the pipeline on behalf of a session, and measures how soon its sound comes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from omni_actors.client import RequestStream
from omni_actors.http_server.answer import finish_reason, token_counts, usage_of
from omni_actors.http_server.generation import tool_options
from omni_actors.http_server.realtime.session import Ask
from omni_actors.http_server.realtime.session_config import RATE, SessionConfig
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.client import Description
from omni_actors.protocol.results import StageUsage
from omni_actors.telemetry.meters import Meters
from omni_actors.telemetry.metric_table import REALTIME_FIRST_AUDIO, REALTIME_SMOOTH_START
from omni_actors.telemetry.playback import Playback


async def submit(
    ask: Ask, state: ServerState, description: Description, tenant: str, traceparent: str | None
) -> RequestStream:
    """Send the request of a response. Raises `OmniError` or `HttpError`."""
    config = ask.config
    limit = {} if config.max_output_tokens == "inf" else {"max_tokens": config.max_output_tokens}
    return await state.client.submit(
        prompting(config, ask.messages),
        modalities=["text", "audio"] if config.output == "audio" else ["text"],
        voice=config.voice if config.output == "audio" else None,
        params=state.stage_params(config.model, config.stage_params, description, limit),
        seed=config.seed,
        timeout=state.settings.request_timeout,
        request_id=ask.request_id,
        traceparent=traceparent,
        tenant=tenant,
    )


def prompting(config: SessionConfig, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The prompt of a session's messages, with its tools."""
    return {
        "messages": messages,
        **tool_options(config.tools, config.tool_choice, config.parallel_tool_calls, "tool_choice"),
    }


def response_usage(usage: Mapping[str, StageUsage], description: Description) -> dict[str, Any]:
    """The usage of a response, as OpenAI names it; `stages` is an extension."""
    found = usage_of(usage, description)
    return {
        **token_counts(found),
        "output_token_details": found["completion_tokens_details"],
        "stages": found["stages"],
    }


def was_cut(usage: Mapping[str, StageUsage], description: Description) -> bool:
    """Whether the limit of tokens ended the text."""
    return finish_reason(usage, description) == "length"


class Latency:
    """The sound of one answer, timed from the end of the user's speech.

    Args:
        silence: seconds that have passed since then.
    """

    def __init__(self, silence: float) -> None:
        self._began = time.monotonic() - silence
        self._playback = Playback()

    def sound(self, samples: int) -> None:
        """Note a piece of sound that has come now."""
        self._playback.add(time.monotonic(), samples / RATE)

    def report(self, meters: Meters, complete: bool) -> None:
        """Count the answer; its smooth start only if it is `complete`."""
        if not self._playback.first:
            return
        meters.histogram(REALTIME_FIRST_AUDIO).observe(self._playback.first - self._began)
        if complete:
            meters.histogram(REALTIME_SMOOTH_START).observe(self._playback.smooth_start - self._began)
