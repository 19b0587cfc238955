"""Chooses the replica of a stage that takes a request.

It is the one that computes the fewest requests; among equals, one on the host of the stage before, with which it shares
memory. The next turn of a conversation goes to the replica that has the turns before in its prefix cache, unless that
one has much more to do than the mean: so a conversation that everyone asks about fills one replica only up to there.

A turn brings all earlier ones along. A prompt is cut where a later one may continue it, after each message or after
each block of tokens, and the hash of all before a cut names that part. What is remembered of a request is the hash of
its whole prompt; a later request is looked up by its longest part that is known. A wrong match costs time, never an
answer: a replica computes what it does not have.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from omni_actors.config import Modality, PipelineConfig, StageConfig, StageKind
from omni_actors.coordinator.core.replicas import Replica, ReplicaTable
from omni_actors.coordinator.core.requests import ActiveRequest
from omni_actors.protocol.codec import Frame
from omni_actors.protocol.fields import TOKEN_BYTES
from omni_actors.protocol.payloads import Prompt, StageParams

NEIGHBOURS = 16  # replicas of a host that are looked at for one choice
CONVERSATIONS = 65_536  # turns of which the replica is remembered, the latest ones
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
        self._holders: collections.OrderedDict[tuple[str, bytes], tuple[int, int]] = collections.OrderedDict()
        self.chosen: collections.Counter[str] = collections.Counter()

    def parts(self, prompt: Prompt, buffers: Sequence[Frame], params: dict[str, StageParams]) -> tuple[bytes, ...]:
        """The hashes by which to recognize a prompt; nothing if no stage has a choice that depends on it."""
        if not any(self._replicas.count(stage) > 1 for stage in self._caches):
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
            best, by = self._beside(sources, least), "host"
        if best is None:
            best, by = least, "load"
        self.chosen[by] += 1
        return best

    def _holder(self, stage: str, parts: Sequence[bytes], least: Replica) -> Replica | None:
        """The replica that has the beginning of a prompt, unless it has too much to do."""
        if stage not in self._caches:
            return None
        found = next(filter(None, (self._holders.get((stage, part)) for part in parts)), None)
        holder = self._replicas.find(stage, *found) if found is not None else None
        if holder is None or not holder.takes_requests or (holder.congested and not least.congested):
            return None
        loads = [len(replica.computing) for replica in self._replicas.of(stage) if replica.takes_requests]
        return holder if len(holder.computing) <= ABOVE_MEAN * sum(loads) / len(loads) + 1 else None

    def _beside(self, sources: Iterable[Replica], least: Replica) -> Replica | None:
        """A replica that has as little to do as the least loaded one and shares a host with a source, as that does not.

        `None` if the least loaded one does, or there is none.
        """
        hosts = [source.node for source in sources]
        if not hosts or least.node in hosts:
            return None
        found = itertools.chain(
            *(itertools.islice(self._replicas.on_host(least.stage, node), NEIGHBOURS) for node in hosts)
        )
        equal = (least.congested, len(least.computing))
        return next((one for one in found if one.takes_requests and (one.congested, len(one.computing)) == equal), None)

    def hold(self, request: ActiveRequest, replica: Replica) -> None:
        """Bind a request to a replica, and remember that this one computes its prompt."""
        replica.hold(request.request_id)
        if replica.stage in self._caches and request.parts:
            key = (replica.stage, request.parts[0])
            self._holders[key] = (replica.index, replica.epoch)
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
    """Whole blocks of tokens; the media, of which the tokens do not say where they stand, go with the first one."""
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
