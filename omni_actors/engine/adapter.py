"""The model-specific part of an AR engine: stage inputs -> vLLM request, vLLM outputs -> engine events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from omni_actors.engine.arguments import OmniModelConfig
from omni_actors.engine.lora import LoraAdapters
from omni_actors.engine.scheduler import RowStream
from omni_actors.errors import InvalidPayload, PromptTooLong
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.tensors import HostTensor
from omni_actors.stage.engine_interface import EngineEvent, EngineFacts, StageInputs, StageRequest


class RequestOutputs(ABC):
    """Turns the outputs of one request into events, in order.

    Attributes:
        stopped: set by `convert` to end the request although the model would go on.
        stop_reason: set by `convert` with what ended a text, if not the model's own end.
        writes: whether the tokens are an answer.
    """

    stopped: bool = False
    stop_reason: int | str | None = None
    writes: bool = True

    @abstractmethod
    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """Events of one output, except the final `FinishedEvent`. The last output has a `finish_reason`."""


class PromptOnly(RequestOutputs):
    """Of a request that only computes its prompt (`max_tokens` 0); vLLM makes one token nevertheless."""

    writes = False

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """Nothing."""
        return ()


@dataclass(frozen=True, slots=True)
class Admission:
    """A checked request, ready for the core.

    Args:
        stream: set if it takes rows while it runs.
        row_per_position: it is to be given a row of each position (`start` and `rows` of the attachments), also of
            those that come from the prefix cache.
        work: what has to be done before the core may have the request, and takes long; it runs on another thread.
    """

    request: EngineCoreRequest
    outputs: RequestOutputs
    stream: RowStream | None = None
    row_per_position: bool = False
    work: Callable[[], None] | None = None


class AutoregressiveAdapter(ABC):
    """Checks everything that comes from outside before it reaches vLLM. An engine has one adapter.

    Args:
        defaults: sampling parameters for those that a request leaves open.
    """

    def __init__(self, vllm_config: VllmConfig, model_config: OmniModelConfig, defaults: StageParams) -> None:
        self.vllm_config = vllm_config
        self.model_config = model_config
        self.defaults = defaults
        self.max_model_len: int = vllm_config.model_config.max_model_len
        # Declared as a name, too; vLLM has resolved it.
        self.model_dtype = cast("torch.dtype", vllm_config.model_config.dtype)
        self.vocabulary: int = vllm_config.model_config.get_vocab_size()
        self.lora = LoraAdapters({})

    @property
    def facts(self) -> EngineFacts:
        """What the coordinator learns when the stage is ready."""
        return EngineFacts(max_input_tokens=self.max_model_len - 1)

    @abstractmethod
    def admit(self, request: StageRequest, inputs: StageInputs) -> Admission:
        """Check a request and build vLLM's request for it. Raises `OmniError`; keeps no state."""

    def read_rows(self, rows: HostTensor) -> torch.Tensor:
        """Check streamed rows [n, width]; return them on the CPU as the worker takes them. Raises `InvalidPayload`."""
        raise InvalidPayload("This model takes no streamed rows.")

    def read_tokens(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Check n streamed tokens; return what the worker takes, on the CPU: [n, ...]. Raises `InvalidPayload`."""
        raise InvalidPayload("This model takes no streamed tokens.")

    @abstractmethod
    def warm_up_inputs(self, length: int) -> StageInputs:
        """Valid input of about `length` positions, from which more than one row or token can follow."""

    def check_length(self, n_tokens: int) -> None:
        """Raise `PromptTooLong` unless at least one token can follow `n_tokens`."""
        if n_tokens >= self.max_model_len:
            raise PromptTooLong(
                f"The prompt has {n_tokens} tokens; this stage takes at most {self.max_model_len - 1} "
                f"(max_model_len {self.max_model_len})."
            )
