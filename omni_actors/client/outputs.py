"""What users put in and get out, free of torch and vLLM."""

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
    """A prompt that is tokenised already.

    `tensors` and `scalars` are what a single stage takes beside tokens, by name: the talker's "prompt_rows" for
    example. A whole pipeline takes token ids only.
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
        audio: f32 [samples] in [-1, 1] at `sample_rate` Hz; `None` where none came.
        finish_reasons: stage name -> "stop" or "length".
        usage: stage name -> counts and times.
        tensors: what a single stage streamed, by name, joined along the first dimension.
        error: why the request failed, from calls that answer many requests at once; the others raise it.
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
