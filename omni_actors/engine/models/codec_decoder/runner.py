"""Serves decoders whose chunks take one step: cuts requests into chunks, all chunks of a step share batches.

Where an utterance is cut depends on the policy alone, never on when its codes came; so a request that is repeated is
decoded in the same chunks. On CUDA batches are graphs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from omni_actors.engine.models.chunks import WARM_UP, ChunkPolicy, ChunkStream, VocoderRunner
from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder, Sizes
from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.diffusers_layout import fill, same_everywhere
from omni_actors.engine.rows import moved
from omni_actors.engine.workers.diffusion import DiffusionJob, StepResult
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.protocol.messages import UNHEARD
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest
from omni_actors.stage.sound import CHUNKS_AHEAD, Ahead

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Copies of the widest activation that are alive at a time, for the memory estimates.
COPIES = 4


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


class Batches(Protocol):
    """Decodes chunks that are alike in one batch."""

    def alike(self, chunk: CodecChunk) -> Hashable:
        """A key that chunks of one batch have in common."""

    def decode(
        self, chunks: Sequence[CodecChunk]
    ) -> tuple[Sequence[torch.Tensor], Sequence[Sequence[torch.Tensor] | None]]:
        """Decode chunks that are alike; they do not change.

        Returns:
            For each its f32 samples, and the state after it in memory of its own, which no one reads after the last.
        """

    def capture(self, first: int, lengths: Sequence[int]) -> None:
        """Capture the graphs of first chunks of `first` frames, and of later ones of all `lengths`. Needs CUDA."""


class BatchedDecoder:
    """Decodes chunks of one length that are all first ones, or all later ones.

    Args:
        most: chunks of the largest batch.
    """

    def __init__(self, decoder: CodecDecoder, device: torch.device, most: int) -> None:
        self.decoder = decoder
        self._device = device
        self._most = most
        # By whether first, frames and batch: codes and position, which are read, and samples.
        self._graphs: CudaGraphs[tuple[bool, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = CudaGraphs()
        codes = torch.zeros(1, decoder.sizes.num_quantizers, 1, dtype=torch.int64, device=device)
        with torch.inference_mode():
            _, state = decoder(codes, codes.new_zeros(1), None)
        self._state_size: int = state.shape[1]
        self._dtype: torch.dtype = state.dtype
        # Of the graphs, which all read and write the same.
        self._before = self._after = state.new_zeros(0)

    @property
    def state_bytes(self) -> int:
        """Bytes that an utterance leaves on the device between two chunks."""
        return self._state_size * self._dtype.itemsize

    def alike(self, chunk: CodecChunk) -> Hashable:
        """See `Batches`."""
        return chunk.position == 0, chunk.frames

    def decode(self, chunks: Sequence[CodecChunk]) -> tuple[list[torch.Tensor], list[Sequence[torch.Tensor] | None]]:
        """See `Batches`."""
        states = [chunk.carry.state[0] for chunk in chunks if chunk.carry.state is not None]
        codes = moved(torch.stack([chunk.codes for chunk in chunks]), self._device)
        position = moved(torch.tensor([chunk.position for chunk in chunks]), self._device)
        # The smallest graph that takes the batch, if there is one.
        keys = ((not states, chunks[0].frames, size) for size in batch_sizes(self._most) if size >= len(chunks))
        key = next((key for key in keys if key in self._graphs.tensors), None)
        if key is None:
            samples, after = self.decoder(codes, position, torch.stack(states) if states else None)
        else:
            for static, given in zip(self._graphs.tensors[key], (codes, position), strict=False):
                static[: len(chunks)] = given
            if states:
                torch.stack(states, out=self._before[: len(chunks)])
            samples = self._graphs.replay(key)[2][: len(chunks)].clone()
            after = self._after[: len(chunks)]
        # Copies: views would keep the whole batch's states alive, and a graph writes them again.
        kept = [torch.empty(self._state_size, dtype=self._dtype, device=self._device) for _ in chunks]
        torch._foreach_copy_(kept, list(after))
        sound = [samples[index, chunk.unheard : chunk.samples] for index, chunk in enumerate(chunks)]
        return sound, [(state,) for state in kept]

    @torch.inference_mode()
    def capture(self, first: int, lengths: Sequence[int]) -> None:
        """See `Batches`."""
        self._before = torch.zeros(self._most, self._state_size, dtype=self._dtype, device=self._device)
        self._after = torch.zeros_like(self._before)
        quantizers = self.decoder.sizes.num_quantizers
        shapes = [(True, first), *((False, length) for length in lengths)]
        # The largest first, so that the others find room in its memory.
        for batch in reversed(batch_sizes(self._most)):
            for begins, frames in sorted(shapes, key=lambda shape: -shape[1]):
                codes = torch.zeros(batch, quantizers, frames, dtype=torch.int64, device=self._device)
                run = partial(self._pass, codes, codes.new_zeros(batch), begins)
                self._graphs.capture((begins, frames, batch), run)

    def _pass(
        self, codes: torch.Tensor, position: torch.Tensor, begins: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch = len(codes)
        samples, after = self.decoder(codes, position, None if begins else self._before[:batch])
        self._after[:batch].copy_(after)
        return codes, position, samples


def batch_sizes(most: int) -> list[int]:
    """Sizes of batches with a graph: powers of two, and the largest."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*sizes, most]


class ChunkRunner(VocoderRunner):
    """Frames of codes to a waveform, f32 [samples]. A subclass loads the decoder.

    Attributes:
        cutting, batches: set by `load`.
    """

    chunks = ChunkPolicy(first=1, largest=8, look_ahead=0)
    cutting: Cutting
    batches: Batches

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if self.policy is not None and self.policy.look_ahead:
            raise ConfigError("decode.look_ahead_blocks: this decoder knows its look-ahead; remove it or set it to 0.")

    # -- life cycle

    @property
    def facts(self) -> EngineFacts:
        """Sample rate, and the longest utterance in codes."""
        sizes = self.cutting.sizes
        longest = sizes.max_position_embeddings * sizes.num_quantizers
        return EngineFacts(sample_rate=sizes.sample_rate, max_input_tokens=longest, parameters=())

    def warm_up(self) -> None:
        """Capture the graphs and decode an utterance, so that no request waits while a kernel is chosen."""
        if self.device.type == "cuda" and self.policy is not None:
            self.batches.capture(self.policy.first, self.cutting.lengths())
        frames = 4 * self.policy.largest if self.policy is not None else 1
        inputs = StageInputs(token_ids=[0] * (frames * self.cutting.sizes.num_quantizers))
        for _ in self.rehearse(self.open(StageRequest(WARM_UP, StageParams(), seed=0), inputs)):
            pass

    # -- requests

    def open(self, request: StageRequest, inputs: StageInputs) -> CodecStream:
        """Check the parameters and first frames of a request.

        Raises:
            OmniError: one of them cannot be decoded.
        """
        # The seed is accepted and unused: decoding is deterministic.
        if foreign := sorted(set(request.params.given()) - {"seed"}):
            raise InvalidRequest(
                f"Parameters {foreign} do not apply to this decoder.", hint="It takes none; leave them out."
            )
        cutting, carry = self.begin(request)
        self._carries.add(carry)
        stream = CodecStream(cutting, carry, self._unheard(inputs))
        stream.extend(tuple(inputs.token_ids), complete=inputs.complete)
        return stream

    def begin(self, request: StageRequest) -> tuple[Cutting, DecoderCarry]:
        """How a request is cut, and what it carries from one chunk to the next. Raises `OmniError`."""
        return self.cutting, DecoderCarry()

    def _unheard(self, inputs: StageInputs) -> int:
        unheard = inputs.scalars.get(UNHEARD, 0)
        width = self.cutting.sizes.num_quantizers
        if isinstance(unheard, bool) or not isinstance(unheard, int) or unheard < 0 or unheard % width:
            raise InvalidPayload(f"{UNHEARD}: must be the number of codes in whole frames of {width}; got {unheard!r}.")
        return unheard

    def omni_counts(self) -> dict[str, int]:
        """Chunks that have not ended, and the states that are held with their bytes."""
        held = [carry.state for carry in self._carries if carry.state is not None]
        return {
            "chunks": len(self.held),
            "carried": len(held),
            "allocated_bytes": sum(tensor.untyped_storage().nbytes() for state in held for tensor in state),
        }

    @torch.inference_mode()
    def step(self, request_ids: Sequence[str]) -> dict[str, StepResult]:
        """Decode these chunks to waveforms f32 [samples]."""
        alike: dict[Hashable, list[str]] = defaultdict(list)
        for request_id in request_ids:
            chunk = self.held[request_id]
            if chunk.frames:
                alike[self.batches.alike(chunk)].append(request_id)
        waveforms: dict[str, torch.Tensor] = {}
        states: dict[str, Sequence[torch.Tensor] | None] = {}
        for members in alike.values():
            samples, after = self.batches.decode([self.held[request_id] for request_id in members])
            waveforms.update(zip(members, samples, strict=True))
            states.update(zip(members, after, strict=True))
        # Nothing may fail from here on: a raised error means that no request has advanced.
        for request_id in request_ids:
            chunk = self.held[request_id]
            chunk.carry.state = None if chunk.last else states[request_id]
        heard = {request_id for request_id, waveform in waveforms.items() if waveform.numel()}
        return {
            request_id: StepResult({"audio": waveforms[request_id]} if request_id in heard else {})
            for request_id in request_ids
        }


class CodecRunner(ChunkRunner):
    """Serves a `CodecDecoder`. A model's own class makes it and reads its weights."""

    @abstractmethod
    def make_decoder(self) -> CodecDecoder:
        """The decoder with random weights, on the CPU. Raises `StartupError` if the checkpoint describes none."""

    @abstractmethod
    def read_weights(self) -> Mapping[str, torch.Tensor]:
        """The decoder's weights by their names in it."""

    def load(self, *, dummy: bool) -> None:
        """Make the decoder and read its weights.

        Raises:
            StartupError: weights are missing, or do not fit the configuration.
        """
        with same_everywhere():
            decoder = self.make_decoder().eval()
        if not dummy:
            fill(decoder, self.read_weights().items(), f"the codec decoder in {self.model_name!r}")
        decoder.requires_grad_(False).to(self.device, self.dtype)
        self.batches = batches = BatchedDecoder(decoder, self.device, self.max_requests)
        self.cutting = Cutting(decoder.sizes, self.policy, batches.state_bytes, self.dtype.itemsize)
