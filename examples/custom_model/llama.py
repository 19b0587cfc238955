"""vLLM's Llama in place of the thinker: text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine import EngineCoreOutput

from omni_actors.engine.adapter import Admission, AutoregressiveAdapter, RequestOutputs, TextDecoder
from omni_actors.engine.core import make_request
from omni_actors.engine.models import ModelSpec
from omni_actors.engine.sampling import make_sampling_params
from omni_actors.errors import InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import HostTensor
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineEvent, StageInputs, StageRequest, TextEvent

ARCHITECTURE = "CustomModelLlama"

# --8<-- [start:outputs]


class LlamaOutputs(RequestOutputs):
    """Turns new tokens into new text. A stage that feeds another one would also emit `StreamEvent`s here."""

    def __init__(self, request_id: str, decoder: TextDecoder) -> None:
        self._request_id = request_id
        self._decoder = decoder

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        if not output.new_token_ids:
            return []
        text, token_ids = self._decoder.decode(output)
        self.stopped = self._decoder.stopped  # by a stop string, which vLLM's core does not know
        logprobs = self._decoder.logprobs(output, len(token_ids))
        return [TextEvent(self._request_id, text, token_ids, logprobs=logprobs)]


# --8<-- [end:outputs]
# --8<-- [start:adapter]


class LlamaAdapter(AutoregressiveAdapter):
    """Checks the input and builds vLLM's request from it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tokenizer = cached_tokenizer_from_config(self.vllm_config.model_config)

    def warm_up_inputs(self, length: int) -> StageInputs:
        return StageInputs(token_ids=[0] * length)

    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        token_ids = list(inputs.token_ids)
        if not token_ids:
            raise InvalidRequest("The prompt is empty.")
        self.check_length(len(token_ids))
        if max(token_ids) >= self.vocabulary or min(token_ids) < 0:
            raise InvalidPayload(f"Token ids must lie in 0..{self.vocabulary - 1}.")
        sampling = make_sampling_params(
            request.params.merged_over(self.defaults),
            seed=request.effective_seed,
            end_token_ids=[self._tokenizer.eos_token_id],
            vocabulary=self.vocabulary,
            tokenizer=self._tokenizer,
        )
        core_request = make_request(request.request_id, token_ids, sampling, priority=request.priority)
        return Admission(core_request, LlamaOutputs(request.request_id, TextDecoder(self._tokenizer, core_request)))

    def read_rows(self, rows: HostTensor) -> torch.Tensor:
        raise InvalidPayload("Llama takes no streamed rows.")


# --8<-- [end:adapter]
# --8<-- [start:spec]


def under_our_name(config: PretrainedConfig) -> PretrainedConfig:
    """Register an architecture as a class object, which saves vLLM from inspecting it in a subprocess."""
    if hasattr(config, "num_hidden_layers"):  # vLLM first tries the function on an empty configuration
        config.architectures = [ARCHITECTURE]
    return config


SPEC = ModelSpec(
    kind="autoregressive",
    hf_overrides=under_our_name,
    vllm_models={ARCHITECTURE: LlamaForCausalLM},
    params=StageParams(max_tokens=256, temperature=0.0),
    adapter="custom_model.llama.LlamaAdapter",
)

# --8<-- [end:spec]
