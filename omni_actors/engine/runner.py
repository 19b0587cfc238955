"""Model runner of autoregressive stages: vLLM's V2 runner with rows of embeddings in and rows of hidden states out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from omni_actors.engine.scheduler import RowUpdate
from omni_actors.engine.worker_base import AttachedOutput, HostCopy, OmniRunnerBase
from omni_actors.errors import EngineError

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    VllmRunner = GPUModelRunner
else:
    VllmRunner = object  # what stands behind the mixin in the order of the base classes


@dataclass(frozen=True, slots=True)
class EmitRows:
    """Payload (`extra_args["omni"]`) of a request whose rows a later stage takes."""


class StreamedInputState(ABC):
    """A ModelState whose requests receive rows while they run."""

    @abstractmethod
    def push_rows(self, request_id: str, update: RowUpdate) -> None:
        """Take the rows that arrived since the last step."""

    @abstractmethod
    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended (and was not merely preempted). Ignores unknown ids."""

    @abstractmethod
    def omni_counts(self) -> dict[str, int]:
        """State held for requests, by name; all zero when idle."""


def payload_of(request: NewRequestData) -> Any:
    """`extra_args["omni"]` of a new request; None for vLLM's own warm-up requests."""
    parameters = request.sampling_params
    return (parameters.extra_args or {}).get("omni") if parameters is not None else None


class EmittedRows(AttachedOutput):
    """Rows of a batch on their way to the host; split by request when they arrive."""

    def __init__(
        self,
        inner: AsyncModelRunnerOutput | ModelRunnerOutput,
        rows: HostCopy,
        spans: list[tuple[int, int, int] | None],
        positions: dict[int, HostCopy],
    ) -> None:
        super().__init__(inner)
        self._rows = rows
        self._spans = spans
        self._positions = positions

    def attachments(self) -> list[dict[str, Any] | None]:
        """Wait for the copies; give every request its rows, the first position of which is `start`."""
        rows = self._rows.wait()["rows"]
        result: list[dict[str, Any] | None] = []
        for index, span in enumerate(self._spans):
            if span is None:
                result.append(None)
                continue
            first, last, start = span
            entry: dict[str, Any] = {"start": start, "rows": rows[first:last]}
            if index in self._positions:
                entry["mrope_positions"] = self._positions[index].wait()["positions"]
            result.append(entry)
        return result


class OmniRunnerMixin(OmniRunnerBase, VllmRunner):
    """Mixin, in front of vLLM's V2 `GPUModelRunner` (the base class of the CPU runner, too).

    Rows out: in every step, requests with an `EmitRows` payload get one row [width] for each position computed in it:
    last hidden state + token embedding, without the embedding at multimodal positions of the prompt, and with the given
    embedding where a prompt came as embeddings. That is the input of Qwen2.5-Omni's talker. Rows in:
    `SchedulerOutput.omni_row_updates` goes to the ModelState, if it is a `StreamedInputState`.

    Under pipeline parallelism the last rank has the hidden states and emits the rows, the first one takes rows in; the
    model must be able to embed tokens on both.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._emitting: dict[str, list[Any]] = {}  # request that emits rows -> its media
        self._given: dict[str, torch.Tensor] = {}  # request that emits rows -> its prompt's embeddings, on the CPU

    @property
    def _streamed_input(self) -> StreamedInputState | None:
        return self.model_state if isinstance(self.model_state, StreamedInputState) else None

    # -- vLLM's interface

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Take new requests; remember the media of those that emit rows."""
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            if isinstance(payload_of(request), EmitRows):
                self._emitting[request.req_id] = request.mm_features
                if request.prompt_embeds is not None:
                    self._given[request.req_id] = request.prompt_embeds

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Pass on rows that arrived for running requests."""
        super().update_requests(scheduler_output)
        updates: dict[str, RowUpdate] = getattr(scheduler_output, "omni_row_updates", {})
        if updates and self._streamed_input is not None:
            for request_id, update in updates.items():
                self._streamed_input.push_rows(request_id, update)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Forget requests that have ended."""
        # vLLM treats preempted requests as finished too; only these have really ended.
        for request_id in scheduler_output.finished_req_ids:
            self._emitting.pop(request_id, None)
            self._given.pop(request_id, None)
            if self._streamed_input is not None:
                self._streamed_input.drop_request(request_id)
        super().finish_requests(scheduler_output)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample; attach the rows of the step to the output if a request of the batch emits any."""
        state = self.execute_model_state  # super() clears it
        output = super().sample_tokens(*args, **kwargs)
        if state is None or output is None or state.hidden_states is None:
            return output
        if self._emitting.keys().isdisjoint(state.input_batch.req_ids):
            return output
        return self._emit(output, state.input_batch, state.hidden_states)

    # -- rows out

    @torch.inference_mode()
    def _emit(self, output: Any, batch: InputBatch, hidden_states: torch.Tensor) -> Any:
        n_tokens = batch.num_tokens  # without the padding of CUDA graphs
        starts = batch.num_computed_tokens_np[: batch.num_reqs].tolist()
        offsets = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
        # Under tensor parallelism all ranks look up together; only the first one's result is used.
        embeddings = cast("VllmModel", self.model).embed_input_ids(batch.input_ids[:n_tokens])
        if get_tp_group().rank_in_group:
            return output
        self._put_given(embeddings, batch, starts, offsets)
        media = self._media_positions(batch, starts, offsets)
        if media is not None:
            embeddings = embeddings.masked_fill(media.unsqueeze(-1), 0)
        # A new tensor, so that the next replay of a graph, which reuses the static hidden states, cannot overwrite it.
        rows = hidden_states[:n_tokens] + embeddings
        stream = self.output_copy_stream if rows.is_cuda else None
        spans = [
            (offsets[index], offsets[index + 1], starts[index]) if request_id in self._emitting else None
            for index, request_id in enumerate(batch.req_ids)
        ]
        positions = {
            index: HostCopy({"positions": self._prompt_positions(batch, index)}, stream)
            for index, request_id in enumerate(batch.req_ids)
            if spans[index] is not None and starts[index] == 0 and self._emitting[request_id]
        }
        return EmittedRows(output, HostCopy({"rows": rows}, stream), spans, positions)

    def _put_given(self, embeddings: torch.Tensor, batch: InputBatch, starts: list[int], offsets: list[int]) -> None:
        """Put embeddings that came with a prompt in the place of those of its tokens, in `embeddings` [n_tokens, H]."""
        for index, request_id in enumerate(batch.req_ids if self._given else ()):
            given = self._given.get(request_id)
            if given is not None and starts[index] < len(given):
                rows = given[starts[index] : starts[index] + offsets[index + 1] - offsets[index]]
                on_device = async_tensor_h2d(rows, device=embeddings.device, dtype=embeddings.dtype)
                embeddings[offsets[index] : offsets[index] + len(rows)] = on_device

    def _media_positions(self, batch: InputBatch, starts: list[int], offsets: list[int]) -> torch.Tensor | None:
        """Mask bool [n_tokens] of positions that media fill, or None. Generated tokens are never among them."""
        mask: np.ndarray | None = None
        for index, request_id in enumerate(batch.req_ids):
            start, end = starts[index], starts[index] + offsets[index + 1] - offsets[index]
            for feature in self._emitting.get(request_id, ()):
                place = feature.mm_position
                first, last = max(start, place.offset), min(end, place.offset + place.length)
                if first >= last:
                    continue
                if mask is None:
                    mask = np.zeros(batch.num_tokens, dtype=bool)
                filled = True
                if place.is_embed is not None:
                    filled = place.is_embed[first - place.offset : last - place.offset].numpy()
                mask[offsets[index] + first - start : offsets[index] + last - start] = filled
        return None if mask is None else async_tensor_h2d(mask, device=self.device)

    def _prompt_positions(self, batch: InputBatch, index: int) -> torch.Tensor:
        """M-RoPE positions i64 [3, P] of a request's prompt of P tokens, as the model made them."""
        slot = int(batch.idx_mapping_np[index])
        length = int(self.req_states.prompt_len.np[slot])
        state = self.model_state
        if not isinstance(state, DefaultModelState) or state.rope_state is None:
            raise EngineError("This model takes media but has no M-RoPE positions; a later stage cannot follow it.")
        return state.rope_state.read_prefill_positions(slot, length).to(torch.int64, copy=True)

    # -- OmniRunnerBase

    def omni_counts(self) -> dict[str, int]:
        """Requests in the worker, those of them that emit rows, and rows held for them."""
        counts = {"worker_requests": len(self.req_states.req_id_to_index), "emitting": len(self._emitting)}
        if self._streamed_input is not None:
            counts |= self._streamed_input.omni_counts()
        return counts

    def omni_reset(self) -> None:
        """Forget the forward pass of a step that failed before it was sampled."""
        self.execute_model_state = None
