<<<<<<< HEAD
"""What users put in and get out, free of torch and vLLM."""
=======
"""What offline callers give and get: prompts of tokens, and results. Imports neither torch nor vLLM."""
>>>>>>> helper-b

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
<<<<<<< HEAD
from typing import Any, TypedDict

import numpy
from numpy.typing import NDArray

from omni_actors.errors import OmniError
from omni_actors.messages import StageUsage


class OmniTokensPrompt(TypedDict, total=False):
    """A prompt as token ids, with what omni stages take beside them.

    `prompt_embeds` f32/bf16 [positions, width] stands in for tokens; `additional_information` are named tensors, lists
    or scalars for the stage's model.
    """

    prompt_token_ids: Sequence[int]
    prompt_embeds: Any
    additional_information: Mapping[str, Any]


@dataclass
class OmniRequestOutput:
    """Everything that one request produced.

    `audio` is f32 [samples] in [-1, 1] at `sample_rate` Hz, empty when none was asked for. `error` is set instead of
    raised by calls that answer many requests at once.
=======
from typing import Required, TypedDict

import numpy as np

from omni_actors.errors import OmniError
from omni_actors.messages import HostTensor
from omni_actors.stage.interface import Scalar


class OmniTokensPrompt(TypedDict, total=False):
    """A prompt that is tokenised already.

    `tensors` and `scalars` are what the stage takes beside tokens, by name: the talker's "prompt_rows" for example.
    """

    prompt_token_ids: Required[Sequence[int]]
    tensors: Mapping[str, HostTensor]
    scalars: Mapping[str, Scalar]


@dataclass(slots=True)
class OmniRequestOutput:
    """The whole result of one request.

    Args:
        text: the answer, special tokens left out.
        token_ids: the tokens of the text, or of the stage that ran.
        audio: f32 [samples] at `sample_rate` Hz; None where no audio was asked for.
        finish_reasons: stage name -> "stop" or "length".
        tensors: what a single stage streamed, by name, joined along the first dimension.
        error: why the request failed; the other fields then hold what had come by then.
>>>>>>> helper-b
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
<<<<<<< HEAD
    audio: NDArray[numpy.float32] = field(default_factory=lambda: numpy.zeros(0, numpy.float32))
    sample_rate: int = 0
    usage: dict[str, StageUsage] = field(default_factory=dict)
    error: OmniError | None = None

    @property
    def finish_reasons(self) -> dict[str, str]:
        """Stage name -> why it stopped."""
        return {stage: usage.finish_reason.value for stage, usage in self.usage.items()}
=======
    audio: np.ndarray | None = None
    sample_rate: int = 0
    finish_reasons: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, HostTensor] = field(default_factory=dict)
    error: OmniError | None = None
>>>>>>> helper-b
