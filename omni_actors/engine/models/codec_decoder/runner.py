"""Serves decoders whose chunks take one step: all chunks of a step share batches, on CUDA as graphs."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from omni_actors.engine.models.chunks import WARM_UP, ChunkPolicy, VocoderRunner
from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder
from omni_actors.engine.models.codec_decoder.stream import CodecChunk, CodecStream, Cutting, DecoderCarry
from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.diffusers_layout import fill, same_everywhere
from omni_actors.engine.rows import moved
from omni_actors.engine.workers.diffusion import StepResult
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.protocol.messages import UNHEARD
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
