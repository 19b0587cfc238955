"""Types of what users pass and receive. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Required, TypedDict

import numpy
from numpy.typing import NDArray

from omni_actors.errors import OmniError
from omni_actors.protocol.fields import Scalar
from omni_actors.protocol.results import StageUsage
from omni_actors.protocol.tensors import HostTensor


class OmniTokensPrompt(TypedDict, total=False):
    """A tokenised prompt.

    `tensors` and `scalars` are a single stage's inputs besides tokens, by name, such as the talker's "prompt_rows". A
    whole pipeline takes token ids only.
    """

    prompt_token_ids: Required[Sequence[int]]
    tensors: Mapping[str, HostTensor]
    scalars: Mapping[str, Scalar]


@dataclass(slots=True)
class OmniRequestOutput:
    """The whole result of one request.

    Args:
        text: the answer, without special tokens.
        token_ids: tokens of the text, or of the only stage that ran.
        audio: f32 [samples] in [-1, 1] at `sample_rate` Hz; `None` if there is none.
        finish_reasons: stage name -> "stop" or "length".
        usage: stage name -> counts and times.
        tensors: tensors that a single stage streamed, by name, joined along the first dimension.
        error: why the request failed, in calls that answer many prompts at once; other calls raise it.
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    audio: NDArray[numpy.float32] | None = None
    sample_rate: int = 0
    finish_reasons: dict[str, str] = field(default_factory=dict)
    usage: dict[str, StageUsage] = field(default_factory=dict)
    tensors: dict[str, HostTensor] = field(default_factory=dict)
    error: OmniError | None = None
