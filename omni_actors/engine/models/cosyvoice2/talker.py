"""CosyVoice 2's talker: a Qwen2 that is given a text and the recording of a voice, and goes on with S3 tokens.

Its input is the begin, what is said in the recording, the text, the begin of the speech and the recording's S3 tokens.

Tokens are drawn with repetition-aware sampling: a token comes from the likeliest ones, unless it is among the last ten;
then any other token takes its place, each as likely as the model has it. Here this is one distribution, from which vLLM
draws with the seed of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from transformers import AutoTokenizer, PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor, LogitsProcRequestState

from omni_actors.engine.adapter import Admission
from omni_actors.engine.models import ModelSpec, SpeechLimit, served_as
from omni_actors.engine.models.code_talker import (
    CodecOutputs,
    CodeTalker,
    CodeTalkerAdapter,
    chosen_voice,
    text_of,
    text_to_speak,
    tokens_of,
)
from omni_actors.engine.models.s3_vocoder.voices import VoiceEncoder, read_recording
from omni_actors.engine.models.s3_vocoder.weights import read_tensors
from omni_actors.engine.scheduler import RowStream
from omni_actors.errors import InvalidRequest, StartupError
from omni_actors.protocol.payloads import INSTRUCTIONS, SpeechAbility, StageParams
from omni_actors.stage.engine_interface import EngineFacts, StageInputs, StageRequest

WINDOW = 10  # tokens
SMALLEST = 1e-30  # chance of all other tokens


class Nucleus(NamedTuple):
    """The likeliest tokens: as many as have `top_p` together, at most `top_k`."""

    top_p: float
    top_k: int


def repetition_aware(
    logits: torch.Tensor, recent: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """Logarithms of the chances with which tokens are drawn, f32 [n, vocabulary].

    Args:
        logits: [n, vocabulary].
        recent: i64 [n, WINDOW], the last tokens; -1 where there are none.
        top_p: f64 [n]; `top_k` i64 [n].
    """
    chances = logits.double().softmax(-1)
    ordered, order = chances.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    kept = (ordered.cumsum(-1) - ordered < top_p[:, None]) & (places < top_k[:, None])
    nucleus = torch.zeros_like(chances).scatter(-1, order, ordered * kept)
    nucleus /= nucleus.sum(-1, keepdim=True)
    known = recent >= 0
    repeated = torch.zeros_like(chances).scatter_add(-1, recent.clamp(min=0), known.double()) > 0
    # What each token that would repeat leaves to any other one.
    left = nucleus * repeated / (1 - chances).clamp(min=SMALLEST)
    drawn = nucleus * ~repeated + chances * (left.sum(-1, keepdim=True) - left).clamp(min=0)
    return drawn.log().float()


class RepetitionAware(LogitsProcessor):
    """Applies it to requests that have a `Nucleus` as their payload and are not greedy."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        self._nuclei: list[Nucleus | None] = [None] * req_states.max_num_reqs

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """See `LogitsProcessor`."""
        payload = (sampling_params.extra_args or {}).get("omni")
        self._nuclei[req_idx] = payload if isinstance(payload, Nucleus) and sampling_params.temperature > 0 else None
        return self._nuclei[req_idx] is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """See `LogitsProcessor`."""
        nuclei = [self._nuclei[slot] for slot in ctx.idx_mapping_np.tolist()]
        drawn = [(row, nucleus) for row, nucleus in enumerate(nuclei) if nucleus is not None]
        if not drawn:
            return logits
        device = logits.device
        rows = async_tensor_h2d([row for row, _ in drawn], device=device, dtype=torch.int64)
        slots = ctx.idx_mapping[rows].long()[:, None]
        places = self._states.total_len.gpu[slots] - torch.arange(1, WINDOW + 1, device=device)
        tokens = self._states.all_token_ids.gpu[slots, places.clamp(min=0)].long()
        recent = torch.where(places >= self._states.prompt_len.gpu[slots], tokens, -1)
        top_p = async_tensor_h2d([nucleus.top_p for _, nucleus in drawn], device=device, dtype=torch.float64)
        top_k = async_tensor_h2d([nucleus.top_k for _, nucleus in drawn], device=device, dtype=torch.int64)
        logits[rows] = repetition_aware(logits[rows], recent, top_p, top_k)
        return logits


ARCHITECTURE = "OmniActorsCosyVoice2Talker"
LAYERS = "CosyVoice-BlankEN"  # the folder with the configuration of the layers, and the tokenizer
WEIGHTS, TOKENIZER = "llm.pt", "speech_tokenizer_v2.onnx"
SOUNDS, ENDS = 6561, 3  # tokens
BLOCK = 4  # tokens of a message to the vocoder
LEAST, MOST = 2, 20  # tokens of speech for one of text
INSTRUCTED = "<|endofprompt|>"
# Added to those of the tokenizer, in this order.
SPECIAL = ["<|im_start|>", "<|im_end|>", INSTRUCTED, "[breath]", "<strong>", "</strong>", "[noise]", "[laughter]"]
SPECIAL += ["[cough]", "[clucking]", "[accent]", "[quick_breath]", "<laughter>", "</laughter>", "[hissing]", "[sigh]"]
SPECIAL += ["[vocalized-noise]", "[lipsmack]", "[mn]"]


def recordings(checkpoint: Path) -> Mapping[str, Path]:
    """Each recording in `asset/` is a voice, called like the file. Raises `StartupError` if there is none."""
    found = {path.stem: path for path in sorted((checkpoint / "asset").glob("*.wav"))}
    if not found:
        raise StartupError(
            f"There is no recording of a voice in {checkpoint / 'asset'}.",
            hint="Put one of 0.5 to 30 s there, NAME.wav, and what is said in it, NAME.txt.",
        )
    return found


@served_as(ARCHITECTURE, "intermediate_size")
def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """The talker's configuration out of that of its layers."""
    config.vocab_size = SOUNDS + ENDS
    config.tie_word_embeddings = False
    return config


class CosyVoice2Talker(CodeTalker):
    """The talker as a vLLM model."""

    decoder_class = Qwen2Model

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "llm.model.model.embed_tokens.": None,
            "llm.model.model.": "decoder.",
            "llm.model.lm_head.": None,
            "llm_embedding.": None,
            "speech_embedding.": "codec_embedding.",
            "llm_decoder.weight": "codec_head.weight",
            "llm_decoder.bias": "head_bias",
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.draw_all_codes()
        self._file = Path(vllm_config.model_config.model).parent / WEIGHTS
        self.head_bias = nn.Parameter(torch.zeros(self.config.vocab_size), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the file of the talker; those of the layers' folder are of the language model that it was made of."""
        return AutoWeightsLoader(self).load_weights(read_tensors(self._file).items(), mapper=self.hf_to_vllm_mapper)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """See `CodeTalker`."""
        logits = super().compute_logits(hidden_states)
        return logits if logits is None else logits + self.head_bias


class Continued(NamedTuple):
    """A recording: the ids of what is said in it, and its S3 tokens, none if that is not known."""

    text: list[int]
    sounds: torch.Tensor


class CosyVoice2TalkerAdapter(CodeTalkerAdapter):
    """Turns a text and a voice into a vLLM request over S3 tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, model = self.vllm_config.model_config.hf_config, self.vllm_config.model_config.model
        folder = Path(model).parent
        self.end_token_ids = frozenset(range(SOUNDS, SOUNDS + ENDS))
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        sizes = {"llm.model.model.embed_tokens": len(self._tokenizer), "llm_embedding": 2}
        sizes["speech_embedding"] = self.vocabulary
        if self.vllm_config.load_config.load_format == "dummy":
            tables = [torch.zeros(count, config.hidden_size) for count in sizes.values()]
        else:
            tensors = read_tensors(folder / WEIGHTS)
            tables = [tensors[f"{name}.weight"] for name in sizes]
        self._texts, self._marks, self._sounds = (table.to(self.model_dtype) for table in tables)
        encoder = VoiceEncoder(folder, TOKENIZER)
        self._voices = {name: self._read_voice(path, encoder) for name, path in recordings(folder).items()}

    def _read_voice(self, path: Path, encoder: VoiceEncoder) -> Continued:
        transcript = path.with_suffix(".txt")
        if not transcript.is_file():
            return Continued([], torch.zeros(0, dtype=torch.int64))
        text = transcript.read_text(encoding="utf-8").strip()
        return Continued(self._tokenizer(text)["input_ids"], encoder(*read_recording(path)).tokens)

    @property
    def facts(self) -> EngineFacts:
        """The voices, and that it follows instructions."""
        return EngineFacts(
            voices=tuple(self._voices),
            max_input_tokens=self.max_model_len - 1,
            wants_information=(INSTRUCTIONS,),
            speech=SpeechAbility(instructions="optional"),
        )

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check text, voice and instructions. Raises `OmniError`."""
        given = request.information
        if foreign := sorted(set(given) - {INSTRUCTIONS}):
            raise InvalidRequest(f"The talker takes no information named {foreign}.", field=foreign[0])
        text = list(inputs.token_ids)  # of the warm-up
        if inputs.prompt is not None:
            text = tokens_of(self._tokenizer, text_to_speak(inputs.prompt).strip(), "input", self.max_model_len)
        voice = self._voices[chosen_voice(request.voice, self._voices)]
        if (instructions := text_of(given, INSTRUCTIONS)) is not None:
            before = tokens_of(self._tokenizer, instructions + INSTRUCTED, INSTRUCTIONS, self.max_model_len)
            voice = Continued(before, voice.sounds[:0])
        begin, speech = self._marks.split(1)
        rows = torch.cat([begin, self._texts[[*voice.text, *text]], speech, self._sounds[voice.sounds]])
        params = request.params.merged_over(self.defaults)
        if params.min_tokens is None and params.max_tokens is not None:
            params = msgspec.structs.replace(params, min_tokens=min(LEAST * len(text), params.max_tokens))
        return self.admitted(
            request,
            rows,
            CodecOutputs(request.request_id, self.end_token_ids, BLOCK),
            RowStream(0, complete=True, held_bytes=rows.nbytes, text_tokens=len(text)),
            params=params,
        )

    def sampling_of(
        self, request: StageRequest, params: StageParams | None = None, payload: Any = None
    ) -> SamplingParams:
        """See `CodeTalkerAdapter`; the likeliest tokens are those of `RepetitionAware`, not of vLLM."""
        sampling = super().sampling_of(request, params)
        top_k = sampling.top_k if sampling.top_k > 0 else self.vocabulary
        sampling.extra_args = {"omni": Nucleus(sampling.top_p, top_k)}
        sampling.top_p, sampling.top_k = 1.0, 0
        return sampling

    def warm_up_inputs(self, length: int) -> StageInputs:
        """A text of `length` tokens."""
        return StageInputs(token_ids=[0] * length)


SPEC = ModelSpec(
    kind="autoregressive",
    folder=LAYERS,
    hf_overrides=talker_config,
    vllm_models={ARCHITECTURE: CosyVoice2Talker},
    required={
        "enable_prompt_embeds": True,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "logits_processors": ["omni_actors.engine.models.cosyvoice2.talker:RepetitionAware"],
    },
    # Those of its configuration; vLLM's other parameters change the chances before the likeliest tokens are chosen.
    params=StageParams(max_tokens=2048, temperature=1.0, top_p=0.8, top_k=25),
    steps_per_schedule=BLOCK,
    speech_limit=SpeechLimit(0, MOST),
    adapter="omni_actors.engine.models.cosyvoice2.talker.CosyVoice2TalkerAdapter",
)
