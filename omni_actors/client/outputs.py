"""Types of what users pass and receive. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy
from numpy.typing import NDArray

from omni_actors.errors import OmniError
from omni_actors.protocol.fields import Scalar
from omni_actors.protocol.logprobs import PositionLogprobs, PromptPosition
from omni_actors.protocol.results import StageUsage
from omni_actors.protocol.tensors import HostTensor
from omni_actors.protocol.tools import ToolCall


class OmniTokensPrompt(TypedDict, total=False):
    """A tokenised prompt. An unknown key is an error that names the nearest known one.

    Args:
        prompt_token_ids: the tokens, with one placeholder for each medium.
        multi_modal_data: by modality ("audio", "image", "video") one medium or a list of them, in the forms that
            `AsyncOmniClient.submit` takes.
        mm_processor_kwargs: `{"use_audio_in_video": True}` makes the audios the sound tracks of the videos, in order.
        prompt_embeds: an array [positions, width] that stands in for the tokens' embeddings. Without
            `prompt_token_ids`, sampling that looks at the prompt's tokens (`repetition_penalty`) sees none.
        additional_information: values by name for the stages that want them.
        tensors: for `StageLLM` only: tensors of a single stage's input by name, such as the talker's "prompt_rows".
        scalars: for `StageLLM` only, likewise.
        lists: for `StageLLM` only, likewise.
    """

    prompt_token_ids: Sequence[int]
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    prompt_embeds: Any
    additional_information: Mapping[str, Any]
    tensors: Mapping[str, HostTensor]
    scalars: Mapping[str, Scalar]
    lists: Mapping[str, Sequence[Scalar]]


@dataclass(slots=True)
class OmniRequestOutput:
    """The whole result of one request.

    Args:
        text: the answer, without special tokens.
        token_ids: tokens of the text, or of the only stage that ran.
        audio: f32 [samples] in [-1, 1] at `sample_rate` Hz; `None` if there is none.
        images: pictures, each u8 [height, width, 3 or 4], without previews.
        latents: those of the pictures.
        finish_reasons: stage name -> "stop" or "length".
        usage: stage name -> counts and times.
        tensors: tensors that a single stage streamed, by name, joined along the first dimension.
        tool_calls: calls of tools, with the JSON of their arguments.
        logprobs: of each token of the text, if `logprobs` is among the parameters of its stage.
        prompt_logprobs: of each token of the prompt but the first, if `prompt_logprobs` is.
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
    tool_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptPosition] = field(default_factory=list)
    error: OmniError | None = None
    images: list[NDArray[numpy.uint8]] = field(default_factory=list)
    latents: list[HostTensor] = field(default_factory=list)
