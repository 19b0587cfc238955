"""Obeys operators: reports the state of the pipeline, drains and restarts replicas, shuts down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from omni_actors.coordinator.core.fleet import Fleet
from omni_actors.coordinator.core.instructions import FleetInstruction
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.coordinator.core.operations import operate
from omni_actors.coordinator.reports import Reports
from omni_actors.errors import OmniError, Unauthorized
from omni_actors.host.clocks import STEADY
from omni_actors.logs import get_logger
from omni_actors.protocol.client import Operate, Operation, Report
from omni_actors.protocol.common import Failed
from omni_actors.transport.zap import KeyOwner

logger = get_logger(__name__)

NO_OPERATOR = "Use an operator's folder of keys, made with `omni-actors keys DIR --operator NAME`."


def check_operator(owner: KeyOwner, what: str) -> None:
    """Raise `Unauthorized` unless the owner of a key may operate the pipeline."""
    if not owner.may_operate:
        logger.warning("refused to %s: the client %s is no operator", what, owner.name)
        raise Unauthorized(f"The key of {owner.name} may not {what}.", hint=NO_OPERATOR)


class AdminCommands:
    """Checks that a client may operate the pipeline, and passes its orders on.

    Args:
        obey: carries out what an order leads to.
        on_shutdown: called after the answer was sent when an operator shuts the pipeline down.
    """

    def __init__(
        self,
        requests: RequestMachine,
        fleet: Fleet,
        reports: Reports,
        obey: Callable[[Iterable[FleetInstruction]], None],
        on_shutdown: Callable[[], None],
    ) -> None:
        self._requests = requests
        self._fleet = fleet
        self._reports = reports
        self._obey = obey
        self._on_shutdown = on_shutdown

    def answer(self, client: bytes, owner: KeyOwner, order: Operate) -> Report | Failed:
        """Carry out an order and report the state of the pipeline after it."""
        try:
            if order.operation is not Operation.STATUS:
                check_operator(owner, order.operation)
            text = self._carry_out(order)
        except OmniError as error:
            return Failed.from_error(error)
        return Report(
            text=text,
            description=self._reports.describe(client),
            edges=self._reports.edges(),
            requests=self._requests.statuses(STEADY()),
        )

    def _carry_out(self, order: Operate) -> str:
        if order.operation is Operation.STATUS:
            return ""
        if order.operation is Operation.SHUTDOWN:
            asyncio.get_running_loop().call_soon(self._on_shutdown)
            return "The pipeline shuts down."
        text, instructions = operate(self._fleet, order, time.monotonic())
        self._obey(instructions)
        return text
