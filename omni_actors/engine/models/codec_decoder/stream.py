"""One request of a decoder whose chunks take one step: collects codes and cuts them into chunks, as they arrive.

Where an utterance is cut depends on the policy alone, never on when its codes came; so a request that is repeated is
decoded in the same chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from omni_actors.engine.models.chunks import ChunkPolicy, ChunkStream
from omni_actors.engine.workers.diffusion import DiffusionJob
from omni_actors.stage.sound import CHUNKS_AHEAD, Ahead

# Copies of the widest activation that are alive at a time, for the memory estimates.
COPIES = 4


@dataclass(frozen=True)
class Sizes:
    """What cutting must know of a decoder.

    Args:
        num_quantizers: codes of a frame.
        codebook_size: values that a code can have.
        max_position_embeddings: frames of the longest utterance.
        sample_rate: samples per second.
        widest: elements per frame of the largest tensor between two layers.
        samples: how many samples can be made of the first n frames.
    """

    num_quantizers: int
    codebook_size: int
    max_position_embeddings: int
    sample_rate: int
    widest: int
    samples: Callable[[int], int]


@dataclass(eq=False)
class DecoderCarry:
    """What the chunks of a request leave on the device for the next one, None before the first."""

    state: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class CodecChunk:
    """A validated chunk.

    Args:
        codes: i64 [quantizers, frames] on the host, with the look-ahead. A last chunk may end with frames of padding,
            or have no frames because the utterance turned out to be complete only after all of it had been decoded.
        count: frames of it that are decoded.
        position: frames before it.
        samples: samples of it to send; more would be those of the padding.
        last: whether the utterance ends with it.
        carry: of the request; written when the chunk is complete.
        unheard: samples of it, from the first, that are not sent.
    """

    codes: torch.Tensor = field(repr=False)
    count: int
    position: int
    samples: int
    last: bool
    carry: DecoderCarry = field(repr=False)
    unheard: int = 0

    @property
    def frames(self) -> int:
        """Frames, those of look-ahead and padding among them."""
        return self.codes.shape[1]


@dataclass(frozen=True)
class Cutting:
    """How utterances are cut, and what a chunk takes in memory.

    Args:
        policy: where to cut, in frames; None decodes whole utterances.
        state_bytes: of the state that a chunk leaves for the next one.
        itemsize: bytes of an element of an activation.
        look_ahead: frames behind a chunk that the decoder reads with it.
    """

    sizes: Sizes
    policy: ChunkPolicy | None
    state_bytes: int
    itemsize: int
    look_ahead: int = 0

    def lengths(self) -> tuple[int, ...]:
        """The lengths of chunks that the policy makes, in frames, in ascending order."""
        found: set[int] = set()
        begin = 0
        while self.policy is not None and max(found, default=0) < self.policy.largest:
            end = self.policy.end(begin)
            found.add(end - begin)
            begin = end
        return tuple(sorted(found))

    def step_bytes(self, frames: int) -> int:
        """Estimate of the memory that a chunk takes in its step: activations, and its state twice."""
        return COPIES * frames * self.sizes.widest * self.itemsize + 2 * self.state_bytes


class CodecStream(ChunkStream):
    """A request: collects frames and cuts them into chunks.

    Args:
        carry: shared by all chunks of the request.
        unheard: codes, from the first, whose sound is left out: they are what the others continue.
    """

    def __init__(self, cutting: Cutting, carry: DecoderCarry, unheard: int = 0) -> None:
        sizes, policy = cutting.sizes, cutting.policy
        needed = (cutting.state_bytes, cutting.step_bytes(policy.largest)) if policy is not None else (0, 0)
        super().__init__(sizes.num_quantizers, sizes.codebook_size, sizes.max_position_embeddings, *needed)
        self._cutting, self._carry = cutting, carry
        self._silent = unheard // sizes.num_quantizers  # frames
        self._frame = 0  # where the next chunk begins

    def close(self) -> None:
        """Free what the last chunk left on the device."""
        self._carry.state = None

    def next_job(self) -> DiffusionJob | None:
        """The next chunk, once its frames are there."""
        policy, begin = self._cutting.policy, self._frame
        received = len(self._codes) // self._cutting.sizes.num_quantizers
        if self.finished or (policy is None and not self._complete):
            return None
        end = received if policy is None else policy.end(begin)
        read = end + self._cutting.look_ahead
        if received < read and not self._complete:
            return None
        last = self._complete and (policy is None or received < max(read, end + 1))
        chunk = self._chunk(begin, received if last else end, last=last)
        self._frame = begin + chunk.count
        held = 0 if last else self._cutting.state_bytes
        needed = self._cutting.step_bytes(chunk.frames)
        return self._return(DiffusionJob(chunk, 1, needed, needed, held), last=last)

    def ahead(self, sample_rate: int) -> list[Ahead]:
        """The chunks that `next_job` has not returned."""
        policy, sizes = self._cutting.policy, self._cutting.sizes
        if policy is None or self.finished:
            return []
        received = len(self._codes) // sizes.num_quantizers
        total = received if self._complete else None
        pieces: list[Ahead] = []
        begin = self._frame
        while len(pieces) < CHUNKS_AHEAD and (total is None or begin < total):
            read = policy.end(begin) + self._cutting.look_ahead
            missing = 0 if self._complete else max(0, read - received) * sizes.num_quantizers
            before = sizes.samples(begin) - sizes.samples(min(self._silent, begin))
            pieces.append(Ahead(before / sample_rate, 0.0, 1, missing))
            begin = policy.end(begin)
        return pieces

    def _chunk(self, begin: int, end: int, *, last: bool) -> CodecChunk:
        sizes, look_ahead = self._cutting.sizes, self._cutting.look_ahead
        width, read = sizes.num_quantizers, end if last else end + look_ahead
        codes = torch.tensor(self._codes[begin * width : read * width], dtype=torch.int64).view(-1, width).T
        # Of equal length, chunks share a batch. What comes after the last frame does not change what was before.
        lengths = (length + look_ahead for length in self._cutting.lengths())
        length = next((length for length in lengths if length >= read - begin), read - begin)
        if begin < read < begin + length:
            codes = torch.cat([codes, codes.new_zeros(width, begin + length - read)], dim=1)
        first = sizes.samples(begin)
        unheard = max(0, sizes.samples(min(self._silent, end)) - first)
        return CodecChunk(
            codes.contiguous(), end - begin, begin, sizes.samples(end) - first, last, self._carry, unheard
        )
