"""MiniCPM-o's talker: a Llama that speaks an answer while it is written, ten tokens of it at a time.

Its input is a row for each of ten tokens and the begin of the sound; then come S3 tokens, 25 a second, until it has
spoken the ten, and the rows of the next. The last rows are followed by the end of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason

from omni_actors.engine.adapter import Admission, Parts
from omni_actors.engine.core import make_request
from omni_actors.engine.models import ModelSpec, SpeechLimit
from omni_actors.engine.models.code_talker import CodecOutputs, CodeTalker, CodeTalkerAdapter
from omni_actors.engine.models.diffusers_layout import read_tensors
from omni_actors.engine.models.minicpm_o.config import speech_part
from omni_actors.engine.rows import to_host
from omni_actors.engine.scheduler import RowStream
from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineEvent, StageInputs, StageRequest

ARCHITECTURE = "OmniActorsMiniCpmOTalker"
ROWS = ("prompt_rows", "reply_rows")
GAIN, DIRECTION = (
    "tts.head_code.0.parametrizations.weight.original0",
    "tts.head_code.0.parametrizations.weight.original1",
)
BLOCK = 4  # tokens of a message to the vocoder
PART = 10  # tokens of text that are spoken at a time


def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The talker's configuration out of the checkpoint's, as a Llama's."""
    if not hasattr(config, "tts_config"):  # vLLM first calls the function with an empty configuration
        return config
    speech = speech_part(config)
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    talker = LlamaConfig(
        **{name: speech[name] for name in sizes},
        max_position_embeddings=speech["max_position_embeddings"],
        vocab_size=speech["num_audio_tokens"],
        tie_word_embeddings=False,
        dtype=config.dtype or "bfloat16",
    )
    talker.architectures = [ARCHITECTURE]
    talker.text_end, talker.sound_begin = speech["text_eos_token_id"], speech["audio_bos_token_id"]
    return talker


class MiniCpmOTalker(CodeTalker):
    """The talker as a vLLM model."""

    decoder_class = LlamaModel

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "tts.model.": "decoder.",
            "tts.emb_code.0.": "codec_embedding.",
            "tts.head_code.0.": "codec_head.",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draw_all_codes()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker's part of the checkpoint; return the names of the parameters that were set."""
        return AutoWeightsLoader(self).load_weights(_talker_weights(weights), mapper=self.hf_to_vllm_mapper)


def _talker_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The talker's own weights; the head's gains and directions as one."""
    head: dict[str, torch.Tensor] = {}
    for name, weight in weights:
        if name in (GAIN, DIRECTION):
            head[name] = weight
            if len(head) == 2:
                yield "tts.head_code.0.weight", torch._weight_norm(head[DIRECTION], head[GAIN], 0)
        elif name.startswith(("tts.model.layers.", "tts.model.norm.", "tts.emb_code.0.")):
            yield name, weight


class SpokenParts(CodecOutputs, Parts):
    """Speaks an answer in parts of ten rows. What ends the speech of a part is not heard, nor seen by the next.

    Whether a part is the last is decided by the rows alone, and not by when they come: it is not if there is another
    row. `max_tokens` and `min_tokens` count the codes of all parts; a part before the last may be silent.
    """

    def __init__(self, request: StageRequest, adapter: MiniCpmOTalkerAdapter) -> None:
        super().__init__(request.request_id, adapter.end_token_ids, BLOCK)
        self._adapter, self._priority = adapter, request.priority
        self._sampling = adapter.sampling_of(request)
        self._rows = self._input = adapter.marks[:0]  # rows to speak, and the input of all parts so far
        self._complete = self._last = False
        self._codes: list[int] = []  # of this part
        self._spoken, self._parts = 0, 0  # codes of the parts before, and parts
        self._arrival: float | None = None
        self.goes_on = True

    def extend(self, rows: torch.Tensor | None, *, complete: bool) -> None:
        """See `Parts`."""
        self._rows = torch.cat([self._rows, *([] if rows is None else [rows])])
        self._complete = complete

    def next_part(self) -> tuple[EngineCoreRequest, RowStream] | None:
        """See `Parts`."""
        last = self._complete and len(self._rows) <= PART
        if not self.goes_on or (len(self._rows) <= PART and not last):
            return None
        adapter, rows = self._adapter, self._rows[:PART]
        marks = adapter.marks if last else adapter.marks[1:]
        self._input = torch.cat([self._input, adapter.codes[self._codes], rows, marks])
        self._rows, self._last, self.goes_on = self._rows[PART:], last, False
        self._spoken += len(self._codes)
        self._codes = []
        request_id = f"{self._request_id}/{self._parts}" if self._parts else self._request_id
        self._parts += 1
        sampling = self._sampling.clone()
        sampling.max_tokens, sampling.min_tokens = self._left, max(sampling.min_tokens - self._spoken, 0) if last else 0
        request = make_request(request_id, None, sampling, priority=self._priority, prompt_embeds=self._input)
        self._arrival = request.arrival_time = self._arrival or request.arrival_time  # no newcomer overtakes it
        return request, RowStream(0, complete=True, held_bytes=self._input.nbytes, text_tokens=len(rows))

    @property
    def _left(self) -> int:
        """How many codes may follow those of this part."""
        return (self._sampling.max_tokens or 0) - self._spoken - len(self._codes)

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """See `CodecOutputs.convert`."""
        self._codes += [code for code in output.new_token_ids if code not in self._end_token_ids]
        if output.finish_reason is None or self._last:
            return super().convert(output)
        room = self._adapter.max_model_len - len(self._input) - len(self._codes) - PART - len(self._adapter.marks)
        self.goes_on = self._left > 0 and room > 0
        events = self.collect(output, final=not self.goes_on)
        if not self.goes_on:
            output.finish_reason = VllmFinishReason.LENGTH
        return events


class MiniCpmOTalkerAdapter(CodeTalkerAdapter):
    """Turns the rows of an answer into vLLM requests over S3 tokens.

    Attributes:
        marks: rows [2, width] of the end of the text and the begin of the sound.
        codes: rows [vocabulary, width] of the S3 tokens.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config.model_config.hf_config
        self.row_width = config.hidden_size
        self.end_token_ids = frozenset({self.vocabulary - 1})
        self.marks, self.codes = torch.zeros(2, config.hidden_size), torch.zeros(self.vocabulary, config.hidden_size)
        if self.vllm_config.load_config.load_format != "dummy":
            model = self.vllm_config.model_config.model
            ((_, texts),) = read_tensors(model, "tts.emb_text.")
            ((_, self.codes),) = read_tensors(model, "tts.emb_code.0.")
            self.marks = texts[[config.text_end, config.sound_begin]]
        self.marks, self.codes = self.marks.to(self.model_dtype), self.codes.to(self.model_dtype)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check the first rows of an answer. Raises `OmniError`."""
        self.check_names(inputs.tensors, ROWS)
        outputs = SpokenParts(request, self)
        for name in ROWS:
            if name in inputs.tensors:
                outputs.extend(self.rows_of(inputs.tensors[name]), complete=inputs.complete)
        if (first := outputs.next_part()) is None:
            raise InvalidPayload(
                f"This talker starts with more than {PART} rows of an answer, or all of it.",
                hint=f"Set start_after to {PART + 2}.",
            )
        core_request, stream = first
        return Admission(core_request, outputs, stream)

    def read_rows(self, rows: HostTensor) -> torch.Tensor:
        """Rows of the answer [n, width]. Raises `InvalidPayload`."""
        return self.rows_of(rows)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """Rows of zeros for `length` tokens."""
        return StageInputs(tensors={ROWS[0]: to_host(torch.zeros(length, self.row_width, dtype=self.model_dtype))})


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: MiniCpmOTalker},
    required={"enable_prompt_embeds": True, "skip_tokenizer_init": True, "enable_prefix_caching": False},
    # The model's own `TTSSamplingParams`.
    params=StageParams(max_tokens=2048, temperature=0.8, top_p=0.85, top_k=25, repetition_penalty=1.05),
    steps_per_schedule=BLOCK,
    speech_limit=SpeechLimit(75, 40),  # of a part: 3 s, and 1.6 s for each token of text, at 25 tokens a second
    adapter="omni_actors.engine.models.minicpm_o.talker.MiniCpmOTalkerAdapter",
)
