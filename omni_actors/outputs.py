"""What offline callers give and get: prompts of tokens, and results. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    audio: np.ndarray | None = None
    sample_rate: int = 0
    finish_reasons: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, HostTensor] = field(default_factory=dict)
    error: OmniError | None = None
