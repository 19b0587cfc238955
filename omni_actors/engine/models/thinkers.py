"""What thinkers of omni models and encoders share: prompts with media or embeddings in; text, states and rows out.

A ModelState knows whose states a later stage takes, and where in a prompt media are. Outputs give out the text, and to
a talker what is to be spoken.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from omni_actors.engine.adapter import Admission, TextAdapter, TextDecoder, TextOutputs
from omni_actors.engine.encoded_requests import RequestReader, merged_patches
from omni_actors.engine.rows import check_rows, embeds_width, to_host, to_torch
from omni_actors.engine.scheduler import RowStream
from omni_actors.engine.workers.base import attachment_of, omni_options
from omni_actors.engine.workers.runner import Attachments, Emission, EmittingState, Step, payload_of
from omni_actors.errors import EngineError, InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import PROMPT_EMBEDS
from omni_actors.stage.engine_interface import EngineEvent, StageInputs, StageRequest, StreamEvent

if TYPE_CHECKING:
    from omni_actors.engine.tool_calls import ToolCallReader


@dataclass(frozen=True, slots=True)
class EmitRows:
    """Payload (`extra_args["omni"]`) of a request whose rows, or states, a later stage takes."""


class MarkedState(DefaultModelState, EmittingState):
    """Knows the requests that emit something: those with `EmitRows`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._emitting: dict[str, NewRequestData] = {}

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Take a new request, or one that resumes after preemption, into slot `req_index`."""
        super().add_request(req_index, new_req_data)
        if isinstance(payload_of(new_req_data), EmitRows):
            self._emitting[new_req_data.req_id] = new_req_data

    def drop_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._emitting.pop(request_id, None)

    def omni_counts(self) -> dict[str, int]:
        """Requests that emit something."""
        return {"emitting": len(self._emitting)}

    def emitting(self, step: Step) -> list[NewRequestData | None]:
        """The requests of the batch, None for those that emit nothing."""
        return [self._emitting.get(request_id) for request_id in step.batch.req_ids]


class ThinkerState(MarkedState):
    """Knows the requests that emit rows. A family's subclass makes the rows (`emit`)."""

    def media_mask(self, step: Step) -> NDArray[np.bool_] | None:
        """Mask bool [tokens] of the positions that media of emitting requests fill; None if there are none.

        Generated tokens are never among them.
        """
        mask: NDArray[np.bool_] | None = None
        for request, start, first_row, last_row in zip(
            self.emitting(step), step.starts, step.offsets, step.offsets[1:], strict=False
        ):
            end = start + last_row - first_row
            for feature in request.mm_features if request is not None else ():
                place = feature.mm_position
                first, last = max(start, place.offset), min(end, place.offset + place.length)
                if first >= last:
                    continue
                if mask is None:
                    mask = np.zeros(step.batch.num_tokens, dtype=bool)
                filled = np.ones(last - first, dtype=bool)
                if place.is_embed is not None:
                    filled = place.is_embed[first - place.offset : last - place.offset].numpy()
                # Videos with sound have features of two kinds in one place.
                mask[first_row + first - start : first_row + last - start] |= filled
        return mask

    def prompt_positions(self, step: Step, index: int) -> torch.Tensor:
        """M-RoPE positions i64 [3, P] of the prompt of P tokens of an emitting request of the batch."""
        if self.rope_state is None:
            raise EngineError("This model takes media but has no M-RoPE positions; a later stage cannot follow it.")
        length = self._emitting[step.batch.req_ids[index]].prompt_len
        positions = self.rope_state.read_prefill_positions(int(step.batch.idx_mapping_np[index]), length)
        return positions.to(torch.int64, copy=True)


def emission(
    requests: Sequence[NewRequestData | None],
    name: str,
    rows: torch.Tensor,
    cuts: Sequence[int],
    details: Callable[[int], dict[str, Any]] = lambda _: {},
    positions: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> Emission:
    """What a step gives to the later stage.

    Args:
        requests: of the batch, None for those that emit nothing.
        rows: of all of them, on the device; `name` is what they are called.
        cuts: the first row of each request, and the number of all rows.
        details: what the request at a place gets besides.
        positions: M-RoPE positions of the prompts that have just begun, by place in the batch.
    """
    named = {f"positions/{index}": tensor for index, tensor in positions.items()}

    def split(host: Mapping[str, torch.Tensor]) -> Attachments:
        parts: Attachments = [
            {name: host[name][cuts[index] : cuts[index + 1]], **details(index)} if request else None
            for index, request in enumerate(requests)
        ]
        for index in positions:
            parts[index] = {**(parts[index] or {}), "mrope_positions": host[f"positions/{index}"]}
        return parts

    return Emission({name: rows, **named}, split)


ENCODED = "encoded"  # name of the states [tokens, width] in a request's attachment


class Residual(nn.Module):
    """In the place of a model's last norm, for a tap before it: only the residual is added."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """The states before the norm."""
        return hidden if residual is None else hidden + residual, None


class EncoderState(MarkedState):
    """Gives the tapped states of the sequences to encode.

    The tap is what the model returns as its last states. A model whose tap lies further down is made without the layers
    above it, so that these are neither loaded nor computed.
    """

    def tapped(self, hidden: torch.Tensor) -> torch.Tensor:
        """What goes to the next stage of states [tokens, width] that the next replay of a graph will overwrite."""
        return hidden.clone()

    def emit(self, step: Step) -> Emission | None:
        """The states of the positions that the step has computed."""
        requests = self.emitting(step)
        if not any(requests):
            return None
        return emission(requests, ENCODED, self.tapped(step.hidden[: step.batch.num_tokens]), step.offsets)


# Of a value in prompt embeddings; the checkpoint's own are below 1. Far larger ones overflow inside the model, and the
# NaN that follow could reach other requests through the key/value cache.
MAX_EMBEDDING = 1e4


class ThinkerOutputs(TextOutputs):
    """Turns outputs into text deltas and, if a later stage takes it, the stream of what is to be spoken.

    What belongs to a token follows its text, so that speech ends where the text does. Tool calls, and what may yet turn
    out to be one, stay here: a call is not spoken. A family's subclass makes the stream (`stream`).
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        decoder: TextDecoder,
        streams: bool,
        calls: ToolCallReader | None = None,
    ) -> None:
        super().__init__(request_id, decoder, calls)
        self._prompt_token_ids = prompt_token_ids
        self._streams = streams

    @abstractmethod
    def stream(self, output: EngineCoreOutput, spoken: int, *, final: bool) -> StreamEvent | None:
        """What the next stage gets with this output.

        Args:
            spoken: how many tokens of the answer are certain to be text.
            final: whether this is the last call.
        """

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """The new text, and what is new for the next stage."""
        events = list(super().convert(output))
        if self._streams:
            ended = self._calls is not None and self._calls.calling
            final = output.finish_reason is not None or self.stopped or ended
            event = self.stream(output, self._spoken(), final=final)
            if event is not None:
                events.append(event)
            self._streams = not ended  # what follows is for the client alone
        return events

    def _spoken(self) -> int:
        released = self._decoder.released
        return released if self._calls is None else min(released, self._calls.spoken)


class RowOutputs(ThinkerOutputs):
    """Streams a row per position, in order, each position once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._next_row = 0
        self._held: list[torch.Tensor] = []  # rows from `_next_row` on whose text is kept back
        self._mrope_positions: torch.Tensor | None = None

    def stream(self, output: EngineCoreOutput, spoken: int, *, final: bool) -> StreamEvent | None:
        """The new rows of the prompt and of tokens that are certain to be spoken."""
        self._keep(attachment_of(output))
        start = self._next_row
        rows = torch.cat(self._held) if len(self._held) > 1 else self._held[0] if self._held else None
        tensors: dict[str, HostTensor] = {}
        if rows is not None:
            certain = len(self._prompt_token_ids) + spoken - start
            self._held = [rows[certain:]] if certain < len(rows) else []
            rows = rows[:certain]
            if len(rows):
                tensors["rows"] = to_host(rows)
                self._next_row += len(rows)
        if not tensors and not final:
            return None
        scalars: dict[str, int] = {}
        if start == 0:
            scalars["prompt_tokens"] = len(self._prompt_token_ids)
            if self._mrope_positions is not None:
                tensors["mrope_positions"] = to_host(self._mrope_positions)
        return StreamEvent(self._request_id, tensors=tensors, scalars=scalars, start=start, final=final)

    def _keep(self, emitted: Mapping[str, Any]) -> None:
        """Append the rows that have not come yet."""
        if not emitted:
            return
        end = self._next_row + sum(map(len, self._held))
        skip = end - emitted["start"]
        if skip < 0:
            raise EngineError(f"Rows {end} to {emitted['start']} of request {self._request_id!r} are missing.")
        rows = emitted["rows"][skip:]  # a preempted request computes its first positions again
        if len(rows):
            self._held.append(rows)
        if "mrope_positions" in emitted and not end:
            self._mrope_positions = emitted["mrope_positions"]


class ThinkerAdapter(TextAdapter):
    """Turns token ids, or the encoded request of the prompt stage (multimodal prompts), into a vLLM request.

    Attributes:
        outputs_class: makes the events of a request.
        row_per_position: whether requests that stream are to be given a row of each position (`Admission`).
        requests: reads prompts with media.
    """

    outputs_class: ClassVar[type[ThinkerOutputs]]
    row_per_position: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model_config = self.vllm_config.model_config
        self._embeds_width = embeds_width(model_config)
        merge_size: int = model_config.hf_config.thinker_config.vision_config.spatial_merge_size
        self.requests = RequestReader(merged_patches(merge_size), self.audio_embeddings)
        self._keeps_rows = self.row_per_position and bool(omni_options(self.vllm_config).get("row_cache_bytes", 0))

    @staticmethod
    @abstractmethod
    def audio_embeddings(frames: int) -> int:
        """How many embeddings the encoder makes of this many frames of audio."""

    @abstractmethod
    def reads_prefix_cache(self, request: StageRequest, features: Sequence[MultiModalFeatureSpec]) -> bool:
        """Whether the request may skip cached positions.

        They are not computed, so nothing is emitted for them. With `row_per_position` they have the rows of an earlier
        request, and only positions with such rows are skipped.
        """

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check tokens, and features or embeddings. Raises `OmniError` for what the model cannot take."""
        token_ids = list(inputs.token_ids)
        features: list[MultiModalFeatureSpec] = []
        embeds: torch.Tensor | None = None
        nameless = PROMPT_EMBEDS in inputs.tensors and not token_ids
        if PROMPT_EMBEDS in inputs.tensors:
            embeds = self.read_embeds(inputs.tensors, token_ids)
            token_ids = token_ids or [0] * len(embeds)
        else:
            token_ids, features = self.requests.read(inputs.tensors, token_ids)
        self.check_tokens(token_ids)
        prompt_only = request.params.max_tokens == 0
        if prompt_only and request.streams:
            raise InvalidRequest("max_tokens 0: without a text there is nothing to speak.", field="max_tokens")
        calls = self.tool_calls(inputs, token_ids) if not prompt_only else None
        emits = request.streams or (prompt_only and self._keeps_rows)  # a later request may need the rows
        core_request = self.make_request(
            request,
            None if nameless else token_ids,
            calls,
            payload=EmitRows() if emits else None,
            read_prefix_cache=self.reads_prefix_cache(request, features),
            prompt_embeds=embeds,
            mm_features=features or None,
        )
        decoder = TextDecoder(self._tokenizer, core_request)
        outputs = self.outputs_class(request.request_id, token_ids, decoder, request.streams, calls)
        # Embeddings are held as long as the request, on the device too: they count for the budget.
        stream = RowStream(0, complete=True, held_bytes=embeds.nbytes) if embeds is not None else None
        return Admission(core_request, outputs, stream, row_per_position=self.row_per_position and emits)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """Prompt of `length` times the first token, with embeddings of zeros if the stage takes any."""
        tensors = {}
        if self._embeds_width:  # adds one kernel to those that token ids need
            zeros = torch.zeros(length, self._embeds_width, dtype=self.model_dtype)
            tensors[PROMPT_EMBEDS] = to_host(zeros)
        return StageInputs(token_ids=[0] * length, tensors=tensors)

    def read_embeds(self, tensors: Mapping[str, HostTensor], token_ids: list[int]) -> torch.Tensor:
        """The embeddings of a prompt [positions, width], in the model's dtype on the CPU. Raises `OmniError`.

        Args:
            token_ids: the tokens for which they stand in, one for each position; empty if they have no tokens.
        """
        if not self._embeds_width:
            raise InvalidRequest(f"{PROMPT_EMBEDS}: this stage takes none.", hint="Set engine.enable_prompt_embeds.")
        if len(tensors) > 1:
            raise InvalidPayload(f"{PROMPT_EMBEDS} stand alone; there are the tensors {sorted(tensors)[:8]}.")
        given = tensors[PROMPT_EMBEDS]
        check_rows(given, self._embeds_width, PROMPT_EMBEDS, minimum=1)
        if token_ids and len(token_ids) != given.shape[0]:
            raise InvalidPayload(f"{PROMPT_EMBEDS} have {given.shape[0]} positions for {len(token_ids)} token ids.")
        self.check_length(given.shape[0])
        rows = to_torch(given, PROMPT_EMBEDS)
        if not bool((rows.abs() <= MAX_EMBEDDING).all()):  # false for NaN, too
            raise InvalidPayload(f"{PROMPT_EMBEDS} must be finite and at most {MAX_EMBEDDING:g} in magnitude.")
        return rows.to(self.model_dtype)
