"""Plans where a request runs: which replica of each stage takes it, and which stages run again after a loss.

A stage takes a request on the replica that computes the fewest; among equals, on one on the host of the stage before,
with which it shares memory. The next turn of a conversation goes to the replica that has the turns before in its prefix
cache, unless that one has much more to do than the mean: so a conversation that everyone asks about fills one replica
only up to there.

A turn brings all earlier ones along. A prompt is cut where a later one may continue it, after each message or after
each block of tokens, and the hash of all before a cut names that part. What is remembered of a request is the hash of
its whole prompt; a later request is looked up by its longest part that is known. A wrong match costs time, never an
answer: a replica computes what it does not have.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from omni_actors.config import Modality, PipelineConfig, StageConfig, StageKind
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.request import ActiveRequest
from omni_actors.coordinator.core.suspects import IsolationRuns
from omni_actors.errors import InvalidRequest, StageLost, StageUnavailable, suggest
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import ATTEMPTS, TOKEN_BYTES, ReplicaId
from omni_actors.protocol.payloads import ADDITIONAL_INFORMATION, Prompt, StageParams


class StageGraph:
    """The neighbours of every stage, looked up once."""

    def __init__(self, pipeline: PipelineConfig) -> None:
        self.sources = {stage.name: stage.source_names for stage in pipeline.stages}
        self.downstream = {stage.name: pipeline.downstream(stage.name) for stage in pipeline.stages}

    def again(self, stages: Collection[str], lost: Iterable[str], holds: Callable[[str], bool]) -> set[str]:
        """The stages that run again.

        These are the lost ones, all after them, and those before them whose output is gone as well.

        Args:
            stages: those of the request.
            lost: stages whose work is gone.
            holds: whether a stage's replica is alive, so that it can be asked to send its output again.
        """
        found: set[str] = set()
        look = list(lost)
        while look:
            stage = look.pop()
            if stage in found:
                continue
            found.add(stage)
            look += [after for after in self.downstream[stage] if after in stages]
            look += [before for before in self.sources[stage] if before in stages and not holds(before)]
        return found


CONVERSATIONS = 65_536  # latest turns whose replica is remembered
ABOVE_MEAN = 1.25  # times the mean of requests, and one more: up to there a replica gets the turns of its conversations
BLOCK_BYTES = 256 * TOKEN_BYTES  # of token ids between two cuts
CUTS = 16  # the last ones of a prompt: more than one turn adds
SAMPLE_BYTES = 1024  # of a medium, at its start, middle and end: hashing all of a video would hold up the coordinator
DIGEST_BYTES = 8


class Router:
    """The choice among the replicas of each stage.

    Attributes:
        chosen: how many choices went to the holder of a prefix ("prefix"), to the least loaded one ("load"), to the
            host of the stage before ("host").
    """

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable) -> None:
        self._replicas = replicas
        self._caches = frozenset(stage.name for stage in pipeline.stages if _caches_prefixes(stage))
        self._text_stages = tuple(stage.name for stage in pipeline.stages if Modality.TEXT in stage.outputs)
        self._holders: collections.OrderedDict[tuple[str, bytes], ReplicaId] = collections.OrderedDict()
        self.chosen: collections.Counter[str] = collections.Counter()

    def parts(self, prompt: Prompt, buffers: Sequence[Frame], params: dict[str, StageParams]) -> tuple[bytes, ...]:
        """The hashes by which to recognize a prompt; nothing if no stage has a choice that depends on it."""
        if not any(len(self._replicas.of(stage)) > 1 for stage in self._caches):
            return ()
        adapters = (params[stage].adapter for stage in self._text_stages if stage in params)
        return parts_of(prompt, buffers, next(filter(None, adapters), None))

    def choose(self, stage: str, request: ActiveRequest, sources: Iterable[Replica]) -> Replica | None:
        """The replica that takes a request in a stage, `None` if none is ready. `sources` feed it there."""
        least = self._replicas.choose(stage)
        if least is None:
            return None
        best, by = self._holder(stage, request.parts, least), "prefix"
        if best is None:
            best = self._replicas.choose(stage, {source.node for source in sources}) or least
            by = "load" if best is least else "host"
        self.chosen[by] += 1
        return best

    def _holder(self, stage: str, parts: Sequence[bytes], least: Replica) -> Replica | None:
        """The replica that has the beginning of a prompt, unless it has too much to do."""
        if stage not in self._caches:
            return None
        found = next(filter(None, (self._holders.get((stage, part)) for part in parts)), None)
        holder = self._replicas.at(found) if found is not None else None
        if holder is None or not holder.takes_requests or (holder.congested and not least.congested):
            return None
        loads = [len(replica.computing) for replica in self._replicas.of(stage) if replica.takes_requests]
        return holder if len(holder.computing) <= ABOVE_MEAN * sum(loads) / len(loads) + 1 else None

    def hold(self, request: ActiveRequest, replica: Replica) -> None:
        """Bind a request to a replica, and remember that this one computes its prompt."""
        replica.hold(request.request_id)
        if replica.stage in self._caches and request.parts:
            key = (replica.stage, request.parts[0])
            self._holders[key] = replica.replica_id
            self._holders.move_to_end(key)
            if len(self._holders) > CONVERSATIONS:
                self._holders.popitem(last=False)


def _caches_prefixes(stage: StageConfig) -> bool:
    """Whether a stage computes a prompt faster whose beginning it has computed before."""
    kinds = (StageKind.AUTOREGRESSIVE, StageKind.ECHO, StageKind.CUSTOM)
    cached = stage.engine.get("enable_prefix_caching") is not False  # on by default in all models that write text
    return Modality.TEXT in stage.outputs and stage.kind in kinds and cached


def parts_of(prompt: Prompt, buffers: Sequence[Frame], adapter: str | None = None) -> tuple[bytes, ...]:
    """The hashes of the beginnings of a prompt, the longest first, which is whole but for a piece of a block.

    At most `CUTS`. Another `adapter` would find nothing in the cache.
    """
    if prompt.embeds is not None:
        return ()
    hashed = hashlib.blake2b(msgspec.msgpack.encode((adapter, prompt.tools)), digest_size=DIGEST_BYTES)
    cuts: collections.deque[bytes] = collections.deque(maxlen=CUTS)
    for piece in _messages(prompt, buffers) if prompt.messages else _blocks(prompt, buffers):
        hashed.update(piece)
        cuts.appendleft(hashed.digest())
    return tuple(cuts)


def _messages(prompt: Prompt, buffers: Sequence[Frame]) -> Iterator[bytes]:
    for message in prompt.messages:
        media = [part.media for part in message.content if part.media is not None]
        yield msgspec.msgpack.encode(message) + b"".join(_sample(prompt, index, buffers) for index in media)


def _blocks(prompt: Prompt, buffers: Sequence[Frame]) -> Iterator[bytes]:
    """Whole blocks of tokens. Media go with the first one, as the tokens do not say where they stand."""
    ids = prompt.token_ids
    whole = max(len(ids) // BLOCK_BYTES, 1) * BLOCK_BYTES
    media = b"".join(_sample(prompt, index, buffers) for index in range(len(prompt.media)))
    for begin in range(0, min(whole, len(ids)), BLOCK_BYTES):
        yield (media if not begin else b"") + ids[begin : begin + BLOCK_BYTES]


def _sample(prompt: Prompt, index: int, buffers: Sequence[Frame]) -> bytes:
    """Some bytes of a medium that tell it from others."""
    tensor = prompt.media[index].tensor
    if tensor.buffer >= len(buffers):
        return b""
    data = memoryview(buffers[tensor.buffer]).cast("B")
    middle = len(data) // 2
    pieces = (data[:SAMPLE_BYTES], data[middle : middle + SAMPLE_BYTES], data[-SAMPLE_BYTES:])
    return b"".join((msgspec.msgpack.encode((tensor.shape, len(data))), *pieces))


class Planner:
    """Reads requests and replicas and changes neither, but for the replicas that it reserves for suspects."""

    def __init__(self, pipeline: PipelineConfig, replicas: ReplicaTable) -> None:
        self._replicas = replicas
        self._entry = pipeline.entry.name
        self._max_attempts = pipeline.coordinator.max_attempts
        self._policies = {stage.name: stage.on_replica_loss for stage in pipeline.stages}
        self._speaks = {stage.name: bool(stage.outputs) for stage in pipeline.stages}
        self.graph = StageGraph(pipeline)
        self.isolation_runs = IsolationRuns(replicas)
        self.router = Router(pipeline, replicas)

    def plan(self, request: ActiveRequest, now: float) -> tuple[Replica, ...] | None:
        """Choose a replica for every stage that the request still needs; `None` if it has to wait for one.

        Raises:
            StageLost, StageUnavailable, InvalidRequest: it cannot run, now or later.
        """
        missing = request.missing
        if self._entry in missing and request.retained is None:
            raise _not_kept()
        chosen: dict[str, Replica] = {}
        # The stage that suspects it last: no replica is emptied for a request that has to wait for another one.
        for stage in sorted(missing, key=lambda stage: stage == request.suspected_by):
            if request.suspected_by == stage:
                replica = self.isolation_runs.replica_for(request, now)
            else:
                replica = self.router.choose(stage, request, self._sources(request, stage, chosen))
            if replica is None:
                if self._replicas.recoverable(stage):
                    return None
                text = f"No replica of stage {stage!r} is ready, and none will be.{request.lost_before()}"
                raise StageUnavailable(text, stage=stage)
            chosen[stage] = replica
        replicas = tuple(chosen.values())
        _check_information(request, replicas)
        return replicas

    def _sources(self, request: ActiveRequest, stage: str, chosen: Mapping[str, Replica]) -> Iterator[Replica]:
        """The replicas that feed a stage, as far as they are known."""
        for source in self.graph.sources[stage]:
            replica_id = request.bound.get(source)
            replica = self._replicas.at(replica_id) if replica_id is not None else chosen.get(source)
            if replica is not None:
                yield replica

    def replays(self, stage: str) -> bool:
        """Whether work that a stage loses runs again, as configured."""
        return self._policies[stage] == "replay"

    def may_wait_for(self, stage: str) -> bool:
        """Whether new requests may wait for a stage without a ready replica."""
        return self.replays(stage) and self._replicas.recoverable(stage)

    def replay(self, request: ActiveRequest, lost: str, counts: bool) -> set[str] | None:
        """The stages that run again when the work of the stage `lost` is gone; `None` if the request has to fail.

        `counts` says whether this is one of the losses that `max_attempts` bounds.
        """
        again = self.graph.again(request.stages, [lost], lambda stage: self.holds(request, stage))
        possible = (
            (self._entry not in again or request.retained is not None)
            and request.losses_made_up + counts < self._max_attempts
            and (request.attempt + 1) % ATTEMPTS
            and self.replays(lost)
            and all(self._replicas.recoverable(stage) for stage in again)
        )
        return again if possible else None

    def holds(self, request: ActiveRequest, stage: str) -> bool:
        """Whether the replica that worked on a request is alive."""
        replica_id = request.bound.get(stage)
        replica = self._replicas.at(replica_id) if replica_id is not None else None
        return replica is not None and replica.alive

    def may_have_begun(self, request: ActiveRequest, stage: str) -> bool:
        """Whether a stage may have got input for a request: one that has not cannot have died of it.

        A stage that sends text or audio to the coordinator does so no later than it feeds the stages after it.
        """
        for source in self.graph.sources[stage]:
            if source not in request.stages or source in request.usage or request.next_seq.get(source):
                continue
            if self._speaks[source] or not self.may_have_begun(request, source):
                return False
        return True

    def is_through_with(self, request: ActiveRequest, stage: str) -> bool:
        """Whether a request needs nothing more of a stage: it is done, and so are those that take its output.

        That the stage is done is not enough: its last chunks may have died with it on their way.
        """
        needed = {stage, *self.graph.downstream[stage]} & set(request.stages)
        return needed <= set(request.usage)


def _check_information(request: ActiveRequest, chosen: Sequence[Replica]) -> None:
    """Raise the error of a request whose additional information these replicas need and is gone, or do not want."""
    wanted = {name for replica in chosen for name in replica.facts.wants_information}
    if request.retained is None and not request.information.isdisjoint(wanted):
        raise _not_kept()
    unwanted = sorted(request.information - wanted)
    if unwanted and len(chosen) == len(request.stages):
        raise InvalidRequest(
            f"{ADDITIONAL_INFORMATION}: none of the stages {', '.join(request.stages)} wants {unwanted[0]!r}."
            f"{suggest(unwanted[0], wanted)}",
            hint="A stage names what it wants in EngineFacts or in its StreamProcessor (docs/extending.md).",
        )


def _not_kept() -> StageLost:
    return StageLost("What it takes to run the request again was not kept.")
