"""How stage inputs become a vLLM request, and its outputs events: the model-specific part of an AR engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from omni_actors.engine.arguments import OmniModelConfig
from omni_actors.errors import PromptTooLong
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.engine_interface import EngineEvent, EngineFacts, StageInputs, StageRequest


class RequestOutputs(ABC):
    """Turns the outputs of one request into events, in order."""

    @abstractmethod
    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """Events of one output, without the last `FinishedEvent`; `output.finish_reason` is set on the last."""


@dataclass(frozen=True, slots=True)
class InputStream:
    """A request that takes rows while it runs.

    Args:
        received: decode rows that came with the start.
        complete: whether no more will come.
        n_bytes: bytes of all embeddings that the request holds from the start.
    """

    received: int
    complete: bool
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that was checked and may be added to the core."""

    request: EngineCoreRequest
    outputs: RequestOutputs
    stream: InputStream | None = None


class AutoregressiveAdapter(ABC):
    """One per engine. Everything that comes from outside is checked here, before it reaches vLLM.

    Args:
        defaults: sampling parameters for what a request leaves open.
    """

    def __init__(self, vllm_config: VllmConfig, model_config: OmniModelConfig, defaults: StageParams) -> None:
        self.vllm_config = vllm_config
        self.model_config = model_config
        self.defaults = defaults
        self.max_model_len: int = vllm_config.model_config.max_model_len
        self.vocabulary: int = vllm_config.model_config.get_vocab_size()

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(max_input_tokens=self.max_model_len - 1)

    @abstractmethod
    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check a request and build what vLLM needs. Raises `OmniError`; keeps nothing."""

    @abstractmethod
    def read_rows(self, rows: HostTensor) -> torch.Tensor:
        """Check streamed rows [n, width] and bring them into the model's dtype, on the CPU. Raises `InvalidPayload`."""

    @abstractmethod
    def warm_up_inputs(self, length: int) -> StageInputs:
        """Valid input of about `length` positions, with more than one row or token to come out."""

    def check_length(self, n_tokens: int) -> None:
        """Raise `PromptTooLong` unless at least one token can follow `n_tokens`."""
        if n_tokens >= self.max_model_len:
            raise PromptTooLong(
                f"The prompt has {n_tokens} tokens; this stage takes at most {self.max_model_len - 1} "
                f"(max_model_len {self.max_model_len})."
            )
