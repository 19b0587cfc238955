"""FLUX.2's prompt stage and text encoder.

The first makes token ids of texts, and of pictures the pixels that the VAE encoder takes; the second gives the states
of three of Qwen3's layers, side by side. The model was trained with prompts that are filled up to 512 tokens, and takes
the states of the filling, too, which attend to the prompt and not to each other. Causal attention without a mask, as
vLLM has it, would give others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, Qwen3Model
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from omni_actors.config.checks import check_parameters
from omni_actors.engine.arguments import OmniEngineArgs
from omni_actors.engine.models import ModelSpec, renamed
from omni_actors.engine.models.cuda_graphs import CudaGraphs
from omni_actors.engine.models.diffusers_layout import same_everywhere
from omni_actors.engine.models.flux2 import MAX_TOKENS, is_distilled, reference_picture
from omni_actors.engine.models.pictures import NEGATIVE_STATES, STATES, negative_ids
from omni_actors.engine.models.pictures.prompts import NEGATIVE_PROMPT, PicturePrompts
from omni_actors.engine.models.pictures.vae_stage import MAX_STEPS, TEXT_ENCODER, OneStepStage
from omni_actors.engine.models.placeholder import diffusion_spec
from omni_actors.engine.workers.diffusion import DiffusionJob, DiffusionStream, KnownJobs
from omni_actors.errors import InvalidPayload, PromptTooLong, StartupError
from omni_actors.media.decoders import MediaDecoder
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import Prompt
from omni_actors.stage.engine_interface import StageInputs, StageRequest

ARCHITECTURE = "OmniActorsFlux2Prompts"  # a class object, which vLLM need not inspect in another process


class Flux2Prompts(PicturePrompts):
    """Turns a prompt with up to ten pictures into token ids and pixels; unless distilled, with a negative prompt."""

    def __init__(self, arguments: OmniEngineArgs, config: VllmConfig, limits: MediaLimits) -> None:
        super().__init__(arguments, config, limits)
        self._distilled = is_distilled(Path(config.model_config.model).parent)
        self.parameters = () if self._distilled else (NEGATIVE_PROMPT,)

    def write(self, text: str, pictures: int) -> str:
        """The message of a user; the model sees pictures elsewhere."""
        written: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        return written

    def process(
        self, request: StageRequest, prompt: Prompt, tensors: Sequence[HostTensor], decoder: MediaDecoder | None = None
    ) -> tuple[list[int], dict[str, HostTensor]]:
        """The token ids of a checked prompt; as tensors those of its negative prompt, and its pictures."""
        negative = None if self._distilled else self.tokens(request.params.negative_prompt or "", 0)
        pictures = [reference_picture(image) for image in self.pictures(prompt, tensors, decoder)]
        return self._tokenize(prompt), self.tensors(negative, pictures)


LAYERS = (9, 18, 27)  # before which the states are taken
ACTIVATIONS = 16  # of a step, in values of the width of the gated layer per token


class Flux2TextEncoder(OneStepStage):
    """Token ids to states f32 [512, 3 * width], as transformers computes them."""

    def load(self, *, dummy: bool) -> None:
        """Load what is below the last of the layers.

        Raises:
            StartupError: the weights cannot be read, or there are too few layers.
        """
        folder = self.folder / "text_encoder"
        config = AutoConfig.from_pretrained(folder)
        if config.num_hidden_layers <= LAYERS[-1]:
            raise StartupError(f"The text encoder has {config.num_hidden_layers} layers, not more than {LAYERS[-1]}.")
        config.num_hidden_layers, config.layer_types = LAYERS[-1], config.layer_types[: LAYERS[-1]]
        if dummy:
            with same_everywhere(self.device):
                model = Qwen3Model._from_config(config, dtype=self.dtype)
        else:
            try:
                model = Qwen3Model.from_pretrained(folder, config=config, dtype=self.dtype)
            except (OSError, ValueError, RuntimeError) as error:
                raise StartupError(f"The text encoder in {folder} cannot be loaded: {error}") from error
        model.norm = nn.Identity()  # the states are those before it
        self._model = model.to(self.device).requires_grad_(False).eval()
        self._filling: int = AutoTokenizer.from_pretrained(self.folder / "tokenizer").pad_token_id
        self._ids = torch.zeros(1, MAX_TOKENS, dtype=torch.int64, device=self.device)
        self._shown = torch.zeros_like(self._ids)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture a graph, as all prompts have one size and launching takes longer than computing."""
        self._graphs: CudaGraphs[int, torch.Tensor] = CudaGraphs(cuda=self.device.type == "cuda")
        self._graphs.capture(MAX_TOKENS, self._states)

    def open(self, request: StageRequest, inputs: StageInputs) -> DiffusionStream:
        """Check the token ids of a prompt, and of the negative prompt if there is one."""
        check_parameters("text_encoder", self.facts.parameters, request.params)
        jobs = [self._job(inputs.token_ids, STATES)]
        if (negative := negative_ids(inputs.tensors)) is not None:
            jobs.append(self._job(negative, NEGATIVE_STATES))
        return KnownJobs(jobs, len(inputs.token_ids))

    def _job(self, token_ids: Sequence[int], name: str) -> DiffusionJob:
        vocabulary: int = self._model.config.vocab_size
        if len(token_ids) > MAX_TOKENS:
            raise PromptTooLong(f"The prompt has {len(token_ids)} tokens; at most {MAX_TOKENS} fit.")
        if not token_ids or not all(0 <= token < vocabulary for token in token_ids):
            raise InvalidPayload(f"The prompt needs token ids from 0 to {vocabulary - 1}.")
        needed = MAX_TOKENS * self._model.config.intermediate_size * ACTIVATIONS * self.dtype.itemsize
        return DiffusionJob((torch.tensor(token_ids), name), 1, needed, needed, 8 * len(token_ids), tokens=MAX_TOKENS)

    def compute(self, given: torch.Tensor, detail: str) -> dict[str, torch.Tensor]:
        """The states [512, 3 * width] of token ids i64 [tokens], by the name that `detail` is."""
        self._ids.fill_(self._filling)[0, : len(given)] = given
        self._shown.zero_()[0, : len(given)] = 1
        return {detail: self._graphs.replay(MAX_TOKENS).clone()}

    def _states(self) -> torch.Tensor:
        states = self._model(
            input_ids=self._ids, attention_mask=self._shown, output_hidden_states=True, use_cache=False
        ).hidden_states
        return torch.cat([states[layer][0] for layer in LAYERS], -1)


SPEC = {
    "prompt": ModelSpec(
        kind="prompt",
        folder="text_encoder",
        hf_overrides=renamed(ARCHITECTURE, "num_key_value_heads"),
        vllm_models={ARCHITECTURE: Qwen3ForCausalLM},
        engine={"max_model_len": MAX_TOKENS + 1},
        prompts="omni_actors.engine.models.flux2.texts.Flux2Prompts",
    ),
    "text_encoder": diffusion_spec(
        Flux2TextEncoder,
        "num_key_value_heads",
        MAX_STEPS,
        # One prompt in a step: four, also computed together, give no more pictures a second on a GPU.
        {"dtype": "bfloat16", "max_num_seqs": 8, "max_num_batched_tokens": MAX_TOKENS},
        folder=TEXT_ENCODER,
    ),
}
