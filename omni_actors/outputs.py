"""What users put in and get out, free of torch and vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    audio: NDArray[numpy.float32] = field(default_factory=lambda: numpy.zeros(0, numpy.float32))
    sample_rate: int = 0
    usage: dict[str, StageUsage] = field(default_factory=dict)
    error: OmniError | None = None

    @property
    def finish_reasons(self) -> dict[str, str]:
        """Stage name -> why it stopped."""
        return {stage: usage.finish_reason.value for stage, usage in self.usage.items()}
