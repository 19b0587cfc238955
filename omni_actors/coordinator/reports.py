"""Answers questions about the pipeline, and checks who may operate it."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni_actors.config import StageKind
from omni_actors.config.placement import on_cpu
from omni_actors.coordinator.core.fleet import Fleet
from omni_actors.coordinator.core.replicas import Replica
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.errors import OmniError, Unauthorized
from omni_actors.host.processes import STEADY
from omni_actors.logs import get_logger
from omni_actors.protocol.codec import Decoder, encode
from omni_actors.protocol.fields import Header
from omni_actors.protocol.messages import Description, EdgeStatus, Failed, Observation, Observe, Report
from omni_actors.telemetry.collector import TelemetryCollector
from omni_actors.telemetry.endpoint import render
from omni_actors.telemetry.metrics import Meters
from omni_actors.transport.curve import KeyOwner
from omni_actors.transport.link import PeerLinks, Window

logger = get_logger(__name__)


@dataclass
class Reports:
    """Reads what the other parts of the coordinator know.

    Args:
        decoders: by channel, for counts of what they rejected.
        dropped: what the coordinator's shell dropped, by reason.
        coordinator: its name.
    """

    requests: RequestMachine
    fleet: Fleet
    links: PeerLinks
    collector: TelemetryCollector
    decoders: Mapping[str, Decoder[Any]]
    dropped: collections.Counter[str]
    coordinator: str

    def describe(self, client: bytes) -> Description:
        """Describe the pipeline and a client's own requests."""
        requests, replicas, pipeline = self.requests, self.requests.replicas, self.requests.pipeline
        loaded = {stage.name: replicas.loaded(stage.name) for stage in pipeline.stages}
        declared = {name: replica.facts.parameters for name, replica in loaded.items() if replica is not None}
        parameters = {name: those for name, those in declared.items() if those is not None}
        outputs: dict[str, str] = {modality: stage.name for stage in pipeline.stages for modality in stage.outputs}
        aligner = loaded.get(outputs.get("words", ""))
        return Description(
            coordinator=self.coordinator,
            pipeline=pipeline.name,
            model=pipeline.model,
            modalities=tuple(pipeline.modalities),
            voices=replicas.voices,
            sample_rate=replicas.sample_rate,
            healthy=replicas.healthy,
            in_flight=requests.in_flight,
            queued=requests.queued,
            max_in_flight=pipeline.coordinator.max_in_flight,
            stages=tuple(replica.status() for replica in replicas),
            requests=requests.requests_of(client),
            counts=self._counts(),
            outputs=outputs,
            sampling_stages=tuple(
                stage.name
                for stage in pipeline.stages
                if stage.kind is not StageKind.PROMPT or parameters.get(stage.name)
            ),
            parameters=parameters,
            max_media=requests.gate.max_media,
            adapters=tuple(pipeline.adapters),
            on_cpu=on_cpu(pipeline, sum(node.devices for node in self.fleet.nodes.values())),
            calls_tools=pipeline.tool_call_parser is not None,
            speech=entry.facts.speech if (entry := loaded.get(pipeline.entry.name)) else None,
            hearing=entry.facts.hearing if entry is not None else None,
            aligning=aligner.facts.hearing if aligner is not None else None,
        )

    def _counts(self) -> dict[str, int]:
        counts = {"replays": self.requests.replays, "retained_bytes": self.requests.retained.used}
        counts |= {f"dropped_{reason}": count for reason, count in self._all_dropped().items()}
        counts |= {f"routed_{by}": count for by, count in self.requests.planner.router.chosen.items()}
        for channel, decoder in self.decoders.items():
            counts |= {f"rejected_{channel}_{reason}": count for reason, count in decoder.rejected.items()}
        return counts

    def _all_dropped(self) -> collections.Counter[str]:
        return self.requests.dropped + self.fleet.dropped + self.dropped

    def report(self, client: bytes, text: str) -> Report:
        """The state of the pipeline for an operator, after `text` on what was done."""
        return Report(
            text=text,
            description=self.describe(client),
            edges=tuple(self._edge(replica) for replica in self.fleet.replicas),
            requests=self.requests.statuses(STEADY()),
        )

    def _edge(self, replica: Replica) -> EdgeStatus:
        link, now = self.links.links.get(replica.replica_id), time.monotonic()
        window = (link.window if link is not None else None) or Window(0, 0)
        sent = window.messages_out, window.bytes_out, link.backlog if link is not None else 0
        restarts = replica.history.restarts if replica.history is not None else 0
        silent, idle = now - replica.heard, now - replica.moved
        return EdgeStatus(replica.stage, replica.index, replica.epoch, *sent, restarts, silent, idle, replica.phase)

    def observe(self, question: Observe) -> Observation | Failed:
        """Answer with metrics or timelines, or with why that cannot be had."""
        try:
            if question.subject == "metrics":
                observation = Observation(text=render(self.gather()))
            else:
                observation = self.collector.answer(question)
            # A very large pipeline may exceed the limits.
            encode(Header(""), observation, limits=self.requests.pipeline.limits)
        except OmniError as error:
            return Failed.from_error(error)
        return observation

    def gather(self) -> Meters:
        """All metrics of the pipeline."""
        rejected = {channel: decoder.rejected for channel, decoder in self.decoders.items()}
        return self.collector.gather(self.requests, self.links, rejected, self._all_dropped())


NO_OPERATOR = "Use an operator's folder of keys, made with `omni-actors keys DIR --operator NAME`."


def check_operator(owner: KeyOwner, what: str) -> None:
    """Raise `Unauthorized` unless the owner of a key may operate the pipeline."""
    if not owner.may_operate:
        logger.warning("refused to %s: the client %s is not an operator", what, owner.name)
        raise Unauthorized(f"The key of {owner.name} may not {what}.", hint=NO_OPERATOR)
