"""What operators ask for: the state of the pipeline, draining and restarting replicas, the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from omni_actors.config import PipelineConfig
from omni_actors.coordinator.core.health import HealthPolicy
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.coordinator.core.replicas import Replica
from omni_actors.coordinator.core.states import ReplicaEvent, ReplicaState
from omni_actors.coordinator.stage_links import StageLinks
from omni_actors.errors import InvalidRequest, OmniError, Unauthorized
from omni_actors.logs import get_logger
from omni_actors.protocol.client import Description, EdgeStatus, Operate, Operation, Report
from omni_actors.protocol.common import Failed
from omni_actors.transport.zap import KeyOwner

logger = get_logger(__name__)

NO_OPERATOR = "Use an operator's folder of keys, made with `omni-actors keys DIR --operator NAME`."


class AdminCommands:
    """Obeys those who may give orders.

    Args:
        on_change: called after a replica's state has changed.
        on_shutdown: called, once the answer has been sent, when the end is asked for.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        state: RequestMachine,
        supervision: HealthPolicy,
        links: StageLinks,
        on_change: Callable[[Replica], None],
        on_shutdown: Callable[[], None],
    ) -> None:
        self._drain_seconds = pipeline.coordinator.default_timeout
        self._state = state
        self._supervision = supervision
        self._links = links
        self._on_change = on_change
        self._on_shutdown = on_shutdown

    def answer(self, owner: KeyOwner, order: Operate, describe: Callable[[], Description]) -> Report | Failed:
        """Do it, and tell how the pipeline is afterwards."""
        try:
            if order.operation is not Operation.STATUS and not owner.may_operate:
                logger.warning("refused to %s: the client %s is no operator", order.operation, owner.name)
                raise Unauthorized(f"The key of {owner.name} may not {order.operation}.", hint=NO_OPERATOR)
            text = self._obey(order)
        except OmniError as error:
            return Failed.from_error(error)
        return Report(
            text=text,
            description=describe(),
            edges=tuple(self._edge(replica) for replica in self._state.replicas),
            requests=self._state.requests(time.time()),
        )

    def _obey(self, order: Operate) -> str:
        if order.operation is Operation.STATUS:
            return ""
        if order.operation is Operation.SHUTDOWN:
            # After the answer has been sent.
            asyncio.get_running_loop().call_soon(self._on_shutdown)
            return "The pipeline shuts down."
        replica = self._state.replicas.current(order.stage, order.replica)
        if replica is None:
            known = ", ".join(replica.name for replica in self._state.replicas)
            raise InvalidRequest(f"There is no replica {order.stage}/{order.replica}; there are {known}.")
        if order.operation is Operation.RESTART and replica.state is ReplicaState.DEAD:
            self._supervision.revive(replica, time.monotonic())
            self._on_change(replica)
            return f"{replica.name} is started again."
        if replica.state not in (ReplicaState.READY, ReplicaState.DRAINING):
            text = f"{replica.name} is {replica.state}; only a ready one drains."
            raise InvalidRequest(text, hint="Try again later.")
        replica.on(ReplicaEvent.DRAIN)
        replica.drain_wanted = True
        if order.operation is Operation.RESTART:
            replica.restart_wanted = True
            replica.drain_until = time.monotonic() + self._drain_seconds
        logger.info("drains", extra={"stage": replica.name})
        self._on_change(replica)
        return f"{replica.name} drains; it holds {len(replica.requests)} requests."

    def _edge(self, replica: Replica) -> EdgeStatus:
        link, now = self._links.find(replica.replica_id), time.monotonic()
        window = link.window if link is not None else None
        return EdgeStatus(
            replica.stage,
            replica.index,
            replica.epoch,
            window.messages_out if window is not None else 0,
            window.bytes_out if window is not None else 0,
            link.backlog if link is not None else 0,
            self._supervision.restarts(replica),
            now - replica.heard,
            now - replica.moved,
            replica.phase,
        )
