"""A talker of frames: tables and heads around its layers, its state around a step, its frames for the vocoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from omni_actors.engine.adapter import Admission
from omni_actors.engine.models.code_predictor import CodePredictor, GraphedPredictor, PredictorConfig, batch_sizes
from omni_actors.engine.models.code_talker import CodeOutputs, CodeTalker, CodeTalkerAdapter, Speech, TalkerState
from omni_actors.engine.scheduler import RowStream
from omni_actors.engine.workers.base import attachment_of
from omni_actors.engine.workers.runner import Attachments, Emission, EmittingState, Step
from omni_actors.errors import EngineError
from omni_actors.stage.engine_interface import EngineEvent, StageRequest

# A message per frame and request would cost the engine's thread more time than the step that makes the frame; the first
# ones are sent at once.
FRAMES_PER_EVENT = (1, 1, 2, 4)


class FrameOutputs(CodeOutputs):
    """Frames of one request, the codes of one after those of the other.

    The last code that the talker samples has no frame: it ends the speech, or no step follows that would hear it.
    """

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, FRAMES_PER_EVENT)

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """An event for every group of frames, and the rest with the last."""
        frames, finished = [], output.finish_reason is not None
        if output.new_token_ids and not finished:
            frame = attachment_of(output).get("codes")
            if frame is None or frame[0] != output.new_token_ids[-1]:
                raise EngineError(f"The frame of code {output.new_token_ids[-1]} is missing.")
            frames.append(frame)
        return self.grouped(output, frames, final=finished)


class FrameTalkerAdapter(CodeTalkerAdapter):
    """What the adapters of talkers of frames have in common."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config = self.vllm_config.model_config.hf_config
        self.end_token_ids = frozenset({self.config.codec_end})

    def speak(
        self, request: StageRequest, payload: FramePayload, outputs: FrameOutputs, text_tokens: int, **options: Any
    ) -> Admission:
        """Ask for the frames of a prompt; `text_tokens` of the text are in it. The options are those of `admitted`."""
        length = len(payload.texts)
        held_bytes = length * self.config.hidden_size * self.model_dtype.itemsize
        held_bytes += payload.media.nbytes if payload.media is not None else 0
        stream = RowStream(len(payload.following), payload.complete, held_bytes, text_tokens)
        # vLLM's repetition penalty counts the prompt, too; the pad is never sampled.
        pads = [self.config.codec_pad] * length
        return self.admitted(request, pads, outputs, stream, payload=payload, **options)


SPECIAL_CODES = 1024  # last ids of the vocabulary; only the end is ever sampled
PROJECTED_AT_ONCE = 8192  # rows of the text table


class Projection(nn.Module):
    """Takes rows of one width to the talker's."""

    def __init__(self, given: int, between: int, made: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(given, between)
        self.linear_fc2 = nn.Linear(between, made)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, given] -> [n, made]."""
        projected: torch.Tensor = self.linear_fc2(F.silu(self.linear_fc1(rows)))
        return projected


class FrameTalker(CodeTalker):
    """The model with its code predictor, whole on every rank; a subclass names vLLM's layers.

    Its configuration has, besides what the layers want: `text_sizes` (ids of texts, width of their table, width between
    the layers of their projection), `text_pad`, `codec_end`, `predictor_config` and `predictor_sampling`.

    Attributes:
        hidden_projection: takes a thinker's states to the talker's width, in families that have one.
    """

    text_table: torch.Tensor
    hidden_projection: Projection

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "code2wav.": None,
            "speaker_encoder.": None,
            "talker.model.codec_embedding.": "codec_embedding.",
            "talker.model.": "decoder.",
            "talker.": "",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, width = self.config, self.config.hidden_size
        del self.decoder.embed_tokens  # the model's own is codec_embedding, whole on every rank
        self.codec_embedding = nn.Embedding(config.vocab_size, width)
        predictor = PredictorConfig.of(config.predictor_config, width, **config.predictor_sampling)
        self.code_predictor = CodePredictor(predictor)
        texts, given, between = config.text_sizes
        self.text_projection = Projection(given, between, width)
        # Buffers from the start: on the right device, and defined even without load_weights (dummy weights).
        self.register_buffer("text_table", torch.zeros(texts, width), persistent=False)
        never_sampled = torch.arange(config.vocab_size) >= config.vocab_size - SPECIAL_CODES
        never_sampled[config.codec_end] = False
        self.register_buffer("never_sampled", never_sampled, persistent=False)

    # The class by which vLLM's runner prepares this model's inputs, and that completes the frames.
    get_model_state_cls = staticmethod(lambda: FrameTalkerState)

    def take_table(self, table: torch.Tensor) -> None:
        """Project the table once and for all."""
        for start in range(0, len(self.text_table), PROJECTED_AT_ONCE):
            rows = table[start : start + PROJECTED_AT_ONCE].to(self.text_table)
            self.text_table[start : start + len(rows)] = self.text_projection(rows)


NO_CODE = -1


@dataclass(slots=True)
class FramePayload:
    """The worker's part of a new request: what the positions of its prompt are made of, and the text of its frames.

    Args:
        texts: the text id of each position.
        codes: the code of each of the last positions; `NO_CODE` where something stands in for one.
        following: text ids of frame 0, 1 and so on, as far as they are known at the start.
        complete: whether they are all; frames without one get the one that pads.
        ending: text ids that follow the last one.
        voice: f32 [width], what stands for the voice at position `voice_at`.
        clip: i64 [frames, G], codes that are continued; their frames stand from position `clip_at` on.
        media: the thinker's states [n, thinker's width], which take the place of texts at `places`.
        positions: M-RoPE positions i64 [3, n] of the first positions; None where each is its index.
    """

    texts: list[int]
    codes: list[int]
    following: list[int]
    complete: bool = True
    ending: tuple[int, ...] = ()
    voice: torch.Tensor | None = field(default=None, repr=False)  # vLLM prints requests when a step fails
    voice_at: int = 0
    clip: torch.Tensor | None = field(default=None, repr=False)
    clip_at: int = 0
    media: torch.Tensor | None = field(default=None, repr=False)
    places: list[int] = field(default_factory=list)
    positions: torch.Tensor | None = field(default=None, repr=False)


@dataclass(slots=True)
class _Speech(Speech[int]):
    """A request: the text of its frames, and their residual codes."""

    frames: list[torch.Tensor] = field(default_factory=list)  # each [G - 1], on the device
    summed: bool = False  # whether the slot has the sum of the last frame


class FrameTalkerState(TalkerState, EmittingState):
    """Completes frames right after sampling, so that the first leaves with the step that computes the prompt.

    The sum of a frame's embeddings waits in a slot for the next step, which adds the text's row: two look-ups. A
    preempted request embeds the frames that it has; the predictor never runs twice for one.
    """

    payload_class = FramePayload
    model: FrameTalker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        slots, width = self.max_num_reqs, self.model.config.hidden_size
        self.pad = self.model.config.text_pad
        self._sums = torch.zeros(slots, width, dtype=self.dtype, device=self.device)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._greedy = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self._predictor = GraphedPredictor(self.model.code_predictor, slots, self.dtype, self.device)

    def capture_inner_cudagraphs(self, *args: Any, **kwargs: Any) -> None:
        """Capture the predictor's graphs after the model's own."""
        super().capture_inner_cudagraphs(*args, **kwargs)
        self._predictor.capture(batch_sizes(self.max_num_reqs))

    # -- requests

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Also note how its frames are drawn."""
        super().add_request(req_index, new_req_data)
        if (speech := self._speeches.get(new_req_data.req_id)) is None:
            return
        # A frame whose first code vLLM has dropped with the preemption is sampled again.
        del speech.frames[len(new_req_data.prefill_token_ids or ()) - speech.length :]
        speech.summed = False
        sampling = new_req_data.sampling_params
        if sampling is not None:
            self._seeds[req_index] = sampling.seed or 0
            self._greedy[req_index] = sampling.temperature == 0

    def begin(self, payload: FramePayload) -> _Speech:
        """See `TalkerState`."""
        speech = _Speech(len(payload.texts), payload.ending)
        speech.extend(payload.following, payload.complete)
        return speech

    def pieces(self, rows: torch.Tensor) -> list[int]:
        """Text ids, which come as rows of one number."""
        ids: list[int] = rows.flatten().tolist()
        return ids

    @torch.inference_mode()
    def prompt_inputs(self, payload: FramePayload) -> torch.Tensor:
        """See `TalkerState`."""
        model = self.model
        rows = model.text_table[async_tensor_h2d(payload.texts, device=self.device, dtype=torch.int64)]
        if payload.media is not None:
            places = async_tensor_h2d(payload.places, device=self.device, dtype=torch.int64)
            rows[places] = model.hidden_projection(payload.media.to(self.device, self.dtype))
        codes = async_tensor_h2d(payload.codes, device=self.device, dtype=torch.int64)
        embedded = model.embed_input_ids(codes.clamp(min=0))
        rows[-len(codes) :] += embedded.masked_fill_((codes == NO_CODE).unsqueeze(1), 0)
        if payload.voice is not None:
            rows[payload.voice_at] += payload.voice.to(self.device, self.dtype)
        if payload.clip is not None:
            clip = payload.clip.to(self.device)
            summed = model.code_predictor.embed(clip[:, 1:], model.embed_input_ids(clip[:, 0]))
            rows[payload.clip_at : payload.clip_at + len(clip)] += summed
        return rows

    # -- before the model

    def code_inputs(self, *step: Any) -> torch.Tensor:
        """See `TalkerState`."""
        _, batch, _ = step
        return self.inputs_embeds[: batch.num_tokens_after_padding]

    def put_codes(self, inputs: torch.Tensor, speech: _Speech, first: int, slot: int, ids: torch.Tensor) -> None:
        """See `TalkerState`."""
        if speech.summed and len(inputs) == 1:
            inputs[0] = self._sums[slot]
        else:
            frames = torch.stack(speech.frames[first : first + len(inputs)])
            inputs.copy_(self.model.code_predictor.embed(frames, self.model.embed_input_ids(ids)))

    def last_codes(self, batch: InputBatch) -> torch.Tensor:
        """See `TalkerState`."""
        return torch.index_select(self._sums, 0, batch.idx_mapping[: batch.num_reqs].long())

    def text_rows(self, pieces: Sequence[int]) -> torch.Tensor:
        """See `TalkerState`."""
        return self.model.text_table[async_tensor_h2d(list(pieces), device=self.device, dtype=torch.int64)]

    # -- after sampling

    def emit(self, step: Step) -> Emission | None:
        """Complete the frames whose first codes were sampled; all codes of a frame go to the host together."""
        batch = step.batch
        ends = [start + step.offsets[index + 1] - step.offsets[index] for index, start in enumerate(step.starts)]
        complete: dict[int, _Speech] = {}  # by place in the batch
        for index, request_id in enumerate(batch.req_ids):
            speech = self._speeches.get(request_id)
            if speech is not None and ends[index] >= batch.prefill_len_np[index]:  # else more of its prompt follows
                complete[index] = speech
        if not complete:
            return None
        slots, rows = batch.idx_mapping[: batch.num_reqs].long(), batch.logits_indices[: batch.num_reqs].long()
        if len(complete) < batch.num_reqs:
            chosen = async_tensor_h2d(list(complete), device=self.device, dtype=torch.int64)
            slots, rows = slots[chosen], rows[chosen]
        numbers = [ends[index] - speech.length for index, speech in complete.items()]
        frames = async_tensor_h2d(numbers, device=self.device, dtype=torch.int64)
        tokens = step.sampled[slots].reshape(-1).long()
        first = self.model.embed_input_ids(tokens)
        codes, sums = self._predictor(step.hidden[rows], first, self._seeds[slots], frames, self._greedy[slots])
        self._sums[slots] = sums
        whole = torch.cat((tokens.unsqueeze(1), codes), dim=1)
        for speech, residual in zip(complete.values(), whole[:, 1:].unbind(), strict=True):
            speech.frames.append(residual)
            speech.summed = True

        def split(host: Mapping[str, torch.Tensor]) -> Attachments:
            parts: Attachments = [None] * batch.num_reqs
            for index, frame in zip(complete, host["codes"].tolist(), strict=True):
                parts[index] = {"codes": frame}
            return parts

        return Emission({"codes": whole}, split)
