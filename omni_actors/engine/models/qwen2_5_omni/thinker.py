"""The thinker of Qwen2.5-Omni: vLLM's own model, with an adapter for its requests.

Sends text to the client and, for requests that stream, one row per computed position to the talker: last hidden state
plus token embedding (see `OmniRunnerMixin`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from omni_actors.engine.adapter import Admission
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.runner import EmitRows
from omni_actors.engine.scheduler import RowStream
from omni_actors.engine.tensors import FRAME_PREFIX, check_rows, embeds_width, to_host, to_torch
from omni_actors.engine.text_adapter import TextAdapter, TextOutputs
from omni_actors.engine.text_decoder import TextDecoder
from omni_actors.engine.worker_base import attachment_of
from omni_actors.errors import EngineError, InvalidPayload, InvalidRequest
from omni_actors.protocol.payloads import MEDIA_MODALITIES, PROMPT_EMBEDS, StageParams
from omni_actors.protocol.tensors import DType, HostTensor
from omni_actors.stage.engine_interface import EngineEvent, StageInputs, StageRequest, StreamEvent

if TYPE_CHECKING:
    from vllm.model_executor.models.qwen2 import Qwen2Model

    from omni_actors.engine.tool_calls import ToolCallReader

ARCHITECTURE = "OmniActorsQwen2_5OmniThinker"
MAX_FRAMES = 4096
# Of a value in prompt embeddings; the checkpoint's own are below 1. Far larger ones overflow inside the model, and the
# NaN that follow could reach other requests through the key/value cache.
MAX_EMBEDDING = 1e4


def thinker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The checkpoint's configuration with our own architecture name, which is registered as a class object."""
    if hasattr(config, "thinker_config"):  # vLLM first calls the function with an empty configuration
        config.architectures = [ARCHITECTURE]
    return config


class Qwen2_5OmniThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    """vLLM's model, able to embed tokens on the rank of the last layers, too: a row contains a token's embedding."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        decoder = cast("Qwen2Model", self.language_model.model)
        if get_pp_group().is_last_rank and isinstance(decoder.embed_tokens, PPMissingLayer):
            config = decoder.config
            decoder.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)


class ThinkerOutputs(TextOutputs):
    """Turns outputs into text deltas and rows, in the order of their positions, each position once.

    The row of a token follows its text, so that speech ends where the text does. Rows of a tool call, and of what may
    yet turn out to be one, stay here: a call is not spoken.
    """

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        decoder: TextDecoder,
        streams: bool,
        calls: ToolCallReader | None = None,
    ) -> None:
        super().__init__(request_id, decoder, calls)
        self._prompt_tokens = prompt_tokens
        self._streams = streams
        self._next_row = 0
        self._held: list[torch.Tensor] = []  # rows from `_next_row` on whose text is kept back
        self._mrope_positions: torch.Tensor | None = None

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """The new text, and the new rows if a later stage takes them."""
        events = list(super().convert(output))
        if self._streams:
            ended = self._calls is not None and self._calls.calling
            final = output.finish_reason is not None or self.stopped or ended
            rows = self._rows(attachment_of(output), final=final)
            if rows is not None:
                events.append(rows)
            self._streams = not ended  # what follows is for the client alone
        return events

    def _spoken(self) -> int:
        """How many tokens of the answer are certain to be text."""
        released = self._decoder.released
        return released if self._calls is None else min(released, self._calls.spoken)

    def _rows(self, emitted: Mapping[str, Any], *, final: bool) -> StreamEvent | None:
        self._keep(emitted)
        start = self._next_row
        rows = torch.cat(self._held) if len(self._held) > 1 else self._held[0] if self._held else None
        tensors: dict[str, HostTensor] = {}
        if rows is not None:
            certain = self._prompt_tokens + self._spoken() - start
            self._held = [rows[certain:]] if certain < len(rows) else []
            rows = rows[:certain]
            if len(rows):
                tensors["rows"] = to_host(rows)
                self._next_row += len(rows)
        if not tensors and not final:
            return None
        scalars: dict[str, int] = {}
        if start == 0:
            scalars["prompt_tokens"] = self._prompt_tokens
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
    """Turns token ids, or the encoded request of the prompt stage (multimodal prompts), into a vLLM request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model_config = self.vllm_config.model_config
        self._merge_size: int = model_config.hf_config.thinker_config.vision_config.spatial_merge_size
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._embeds_width = embeds_width(model_config)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check tokens, and features or embeddings. Raises `OmniError` for what the model cannot take."""
        token_ids = list(inputs.token_ids)
        features: list[MultiModalFeatureSpec] = []
        embeds: torch.Tensor | None = None
        if PROMPT_EMBEDS in inputs.tensors:
            token_ids, embeds = self.read_embeds(inputs.tensors, token_ids)
        elif inputs.tensors:
            token_ids, features = self.decode(inputs.tensors, token_ids)
        self.check_tokens(token_ids)
        calls = self.tool_calls(inputs, token_ids)
        core_request = self.make_request(
            request,
            token_ids,
            calls,
            payload=EmitRows() if request.streams else None,
            read_prefix_cache=not request.streams,  # cached positions are not computed and give no rows
            prompt_embeds=embeds,
            mm_features=features or None,
        )
        decoder = TextDecoder(self._tokenizer, core_request)
        outputs = ThinkerOutputs(request.request_id, len(token_ids), decoder, request.streams, calls)
        # Embeddings are held as long as the request, on the device too: they count for the budget.
        stream = RowStream(0, complete=True, held_bytes=embeds.nbytes) if embeds is not None else None
        return Admission(core_request, outputs, stream)

    def warm_up_inputs(self, length: int) -> StageInputs:
        """Prompt of `length` times the first token, with embeddings of zeros if the stage takes any."""
        tensors = {}
        if self._embeds_width:  # adds one kernel to those that token ids need
            zeros = torch.zeros(length, self._embeds_width, dtype=self.model_dtype)
            tensors[PROMPT_EMBEDS] = to_host(zeros)
        return StageInputs(token_ids=[0] * length, tensors=tensors)

    def read_embeds(self, tensors: Mapping[str, HostTensor], token_ids: list[int]) -> tuple[list[int], torch.Tensor]:
        """Token ids of the prompt and the embeddings that stand in for theirs, in the model's dtype on the CPU."""
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
        # Without ids the prompt counts as repetitions of a row of the embedding table that no text uses.
        return token_ids or [self.vocabulary - 1] * len(rows), rows.to(self.model_dtype)

    def decode(
        self, tensors: Mapping[str, HostTensor], token_ids: list[int]
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Prompt ids and media features of an encoded EngineCoreRequest; the rest of it is ignored."""
        names = [f"{FRAME_PREFIX}{index}" for index in range(len(tensors))]
        if len(tensors) > MAX_FRAMES or set(names) != set(tensors):
            raise InvalidPayload(f"The thinker needs the tensors vllm.0, vllm.1, ...; it got {sorted(tensors)[:8]}.")
        frames = []
        for name in names:
            frame = tensors[name].validate(name)
            if frame.dtype is not DType.U8 or len(frame.shape) != 1:
                raise InvalidPayload(f"{name}: needs u8 [bytes]; got {frame.dtype} {list(frame.shape)}.")
            frames.append(bytearray(frame.data))  # a copy: decoded tensors share its memory, and the frame's is reused
        try:
            decoded = self._decoder.decode(frames)
        except Exception as error:
            # Hostile frames make the decoder raise anything from IndexError to RuntimeError.
            raise InvalidPayload(f"The encoded request cannot be read: {type(error).__name__}: {error}") from error
        prompt = decoded.prompt_token_ids
        if prompt is None or decoded.prompt_embeds is not None:
            raise InvalidPayload("The encoded request must hold prompt_token_ids and no prompt_embeds.")
        if token_ids and token_ids != prompt:
            raise InvalidPayload("The encoded request and token_ids disagree about the prompt.")
        features = decoded.mm_features or []
        for feature in features:
            check_feature(feature, len(prompt), self._merge_size)
        return list(prompt), features


def check_feature(feature: MultiModalFeatureSpec, prompt_tokens: int, merge_size: int) -> None:
    """Raise `InvalidPayload` unless one medium's features fit its place in the prompt.

    If the encoder gave more or fewer embeddings than the prompt has places, the step would fail, and with it every
    request of the batch.
    """
    place = feature.mm_position
    if feature.modality not in MEDIA_MODALITIES:
        raise InvalidPayload(
            f"The modality of a medium is one of {', '.join(MEDIA_MODALITIES)}; got {feature.modality!r}."
        )
    if place.offset < 0 or place.length < 1 or place.offset + place.length > prompt_tokens:
        raise InvalidPayload(
            f"{feature.modality}: the placeholder [{place.offset}, {place.offset + place.length}) is outside the "
            f"prompt of {prompt_tokens} tokens."
        )
    mask = place.is_embed
    if mask is not None and (mask.dtype is not torch.bool or tuple(mask.shape) != (place.length,)):
        raise InvalidPayload(f"{feature.modality}: is_embed must be bool [{place.length}].")
    if feature.data is None or not feature.identifier:
        raise InvalidPayload(f"{feature.modality}: features or identifier are missing.")
    try:
        data = {name: item.data for name, item in feature.data.items()}
        expected = count_embeddings(feature.modality, data, merge_size)
    except (KeyError, AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise InvalidPayload(f"{feature.modality}: the features are incomplete ({error!r}).") from error
    if expected != (places := place.get_num_embeds()):
        raise InvalidPayload(f"{feature.modality}: the features give {expected} embeddings for {places} places.")


def count_embeddings(modality: str, data: Mapping[str, Any], merge_size: int) -> int:
    """Number of embeddings that the encoder makes of one medium; -1 if its tensors contradict one another."""
    if modality == "audio":
        frames = int(data["audio_feature_lengths"])
        if frames != data["input_audio_features"].shape[-1] or frames < 1:
            return -1
        return ((frames - 1) // 2 - 1) // 2 + 1  # a convolution of stride 2, then pooling by 2
    suffix = "_videos" if modality == "video" else ""
    time, height, width = (int(size) for size in data[f"{modality}_grid_thw"])
    patches: int = data[f"pixel_values{suffix}"].shape[0]
    if min(time, height, width) < 1 or time * height * width != patches or height % merge_size or width % merge_size:
        return -1
    return patches // merge_size**2


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=thinker_config,
    vllm_models={ARCHITECTURE: Qwen2_5OmniThinker},
    # Prefix caching is for requests that emit no rows.
    engine={"enable_prefix_caching": True, "enable_prompt_embeds": True},
    # The defaults of transformers' Qwen2_5OmniForConditionalGeneration.generate.
    params=StageParams(max_tokens=1024, temperature=0.0),
    adapter="omni_actors.engine.models.qwen2_5_omni.thinker.ThinkerAdapter",
)
