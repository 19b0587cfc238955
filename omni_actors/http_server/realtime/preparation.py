"""Has the pipeline compute a prompt while the user still speaks, so that little is left at the end of the turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from omni_actors.errors import OmniError
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.realtime.answers import prompting
from omni_actors.http_server.realtime.session import Prepare
from omni_actors.http_server.state import ServerState
from omni_actors.logs import get_logger, trace_of
from omni_actors.protocol.client import Description
from omni_actors.telemetry.metric_table import REALTIME_PREPARATIONS

logger = get_logger(__name__)

PRIORITY = 2  # after answers and transcripts: lower values go first


class Preparation:
    """At most one request of a session at a time. Its failure costs time only: the answer computes what is missing.

    Args:
        tenant: whom the requests are for.
        traceparent: trace context of the session.
    """

    def __init__(self, state: ServerState, tenant: str, traceparent: str | None) -> None:
        self._state = state
        self._tenant = tenant
        self._traceparent = traceparent
        self._task: asyncio.Task[None] | None = None

    @property
    def tasks(self) -> Sequence[asyncio.Task[None]]:
        """The request that goes on, if there is one."""
        return (self._task,) if self._task is not None else ()

    def start(self, prepare: Prepare) -> None:
        """Compute a prompt, if the pipeline has nothing better to do; nothing else may be computed."""
        self._task = asyncio.create_task(self._run(prepare), name="realtime preparation")
        self._task.add_done_callback(self._ended)

    def end(self) -> None:
        """End the request in all stages. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("computing a turn before its end failed: %s", trace_of(error))

    async def _run(self, prepare: Prepare) -> None:
        outcome = "cancelled"
        try:
            await self._compute(prepare)
            outcome = "computed"
        except (HttpError, OmniError) as error:
            outcome = "failed"
            logger.info("a turn is not computed before its end: %s", error)
        finally:
            self._state.realtime.meters.count(REALTIME_PREPARATIONS, outcome)

    async def _compute(self, prepare: Prepare) -> None:
        description = await self._state.describe()
        if _busy(description):
            raise HttpError(429, "the pipeline is busy with answers.", code="overloaded")
        config = prepare.config
        stream = await self._state.client.submit(
            prompting(config, prepare.messages),
            modalities=["text"],
            params=self._state.stage_params(config.model, {}, description, {"max_tokens": 0}),
            priority=PRIORITY,
            timeout=self._state.settings.request_timeout,
            traceparent=self._traceparent,
            tenant=self._tenant,
        )
        try:
            await stream.result()
        finally:
            await stream.abort()  # nothing, if it has ended


def _busy(description: Description) -> bool:
    """Whether answers could need the slot."""
    return bool(description.queued) or 2 * description.in_flight >= description.max_in_flight
