"""Runs a codec decoder for batches of chunks: on CUDA as graphs, one for each size of batch and length of chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder
from omni_actors.engine.models.codec_decoder.stream import CodecChunk


@dataclass(frozen=True)
class _BatchGraph:
    """A captured pass with the tensors that it reads and writes; see `CodecDecoder.forward`."""

    graph: torch.cuda.CUDAGraph
    codes: torch.Tensor
    position: torch.Tensor
    samples: torch.Tensor


class BatchedDecoder:
    """Decodes chunks of one length that are all first ones, or all later ones.

    Args:
        most: chunks of the largest batch.
    """

    def __init__(self, decoder: CodecDecoder, device: torch.device, most: int) -> None:
        self.decoder = decoder
        self._device = device
        self._most = most
        self._graphs: dict[tuple[bool, int, int], _BatchGraph] = {}  # by whether first, frames and batch
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

    def decode(self, chunks: Sequence[CodecChunk]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Decode chunks of equal length; they do not change.

        Returns:
            For each its f32 samples, and the state after it in memory of its own.
        """
        states = [chunk.carry.state for chunk in chunks if chunk.carry.state is not None]
        codes = self._to_device(torch.stack([chunk.codes for chunk in chunks]))
        position = self._to_device(torch.tensor([chunk.position for chunk in chunks]))
        graph = self._graph(not states, chunks[0].frames, len(chunks))
        if graph is None:
            samples, after = self.decoder(codes, position, torch.stack(states) if states else None)
        else:
            graph.codes[: len(chunks)] = codes
            graph.position[: len(chunks)] = position
            if states:
                torch.stack(states, out=self._before[: len(chunks)])
            graph.graph.replay()
            samples, after = graph.samples[: len(chunks)].clone(), self._after[: len(chunks)]
        # Copies: views would keep the whole batch's states alive, and a graph writes them again.
        kept = [torch.empty(self._state_size, dtype=self._dtype, device=self._device) for _ in chunks]
        torch._foreach_copy_(kept, list(after))
        return [samples[index, chunk.unheard : chunk.samples] for index, chunk in enumerate(chunks)], kept

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy through pinned memory: any other copy would wait for all the work queued on the device."""
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _graph(self, first: bool, frames: int, batch: int) -> _BatchGraph | None:
        """The smallest graph that takes the batch, if there is one."""
        sizes = (size for size in _batch_sizes(self._most) if size >= batch)
        return next((graph for size in sizes if (graph := self._graphs.get((first, frames, size)))), None)

    @torch.inference_mode()
    def capture(self, first: int, lengths: Sequence[int]) -> None:
        """Capture the graphs of first chunks of `first` frames, and of later ones of all `lengths`. Needs CUDA."""
        self._before = torch.zeros(self._most, self._state_size, dtype=self._dtype, device=self._device)
        self._after = torch.zeros_like(self._before)
        pool = torch.cuda.graph_pool_handle()
        shapes = [(True, first), *((False, length) for length in lengths)]
        # The largest first, so that the others find room in its memory.
        for batch in reversed(_batch_sizes(self._most)):
            for begins, frames in sorted(shapes, key=lambda shape: -shape[1]):
                self._graphs[begins, frames, batch] = self._captured(begins, frames, batch, pool)

    def _captured(self, first: bool, frames: int, batch: int, pool: Any) -> _BatchGraph:
        codes = torch.zeros(batch, self.decoder.sizes.num_quantizers, frames, dtype=torch.int64, device=self._device)
        position = torch.zeros(batch, dtype=torch.int64, device=self._device)
        state = None if first else self._before[:batch]
        self.decoder(codes, position, state)  # kernels are chosen and loaded outside of the graph
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            samples, after = self.decoder(codes, position, state)
            self._after[:batch].copy_(after)
        return _BatchGraph(graph, codes, position, samples)


def _batch_sizes(most: int) -> list[int]:
    """Sizes of batches with a graph: powers of two, and the largest."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*sizes, most]
