"""Fields of chat and text completions that say how the text is generated, in OpenAI's and vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from omni_actors.client import MAX_CHOICES
from omni_actors.http_server.output_formats import AnyResponseFormat, StructuredFields, fields_of, output_form
from omni_actors.http_server.schema_fields import ABSENT
from omni_actors.http_server.vllm_fields import VllmFields
from omni_actors.protocol.fields import PositiveInt
from omni_actors.protocol.payloads import (
    AUTOREGRESSIVE_PARAMS,
    MAX_LOGPROBS,
    AllowedTokens,
    LogitBias,
    StopTokens,
    Word,
    Words,
)

MAX_TOKENS = 1_000_000

Penalty = Annotated[float, Meta(ge=-2, le=2)]


class GenerationFields(VllmFields, frozen=True, kw_only=True):
    """First OpenAI's, then vLLM's. Most become the parameter of the text stage that has their name."""

    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Word | Words | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    response_format: AnyResponseFormat | None = None

    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: Words | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: StructuredFields = ABSENT
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def stage_fields(self) -> dict[str, Any]:
        """The fields that are set, under the names of `StageParams`; not `seed`, which goes to all stages."""
        given = {name: getattr(self, name, None) for name in AUTOREGRESSIVE_PARAMS - {"seed"}}
        given["logprobs"] = self.likeliest()
        given["structured_outputs"] = output_form(self.response_format, self.structured_outputs)
        fields = {name: value for name, value in given.items() if value is not None}
        if isinstance(self.stop, str):
            fields["stop"] = (self.stop,)
        return fields

    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to report at each position; `None` for no log probabilities."""
        return None

    def error_fields(self) -> dict[str, str]:
        """The request's fields at fault, by their names in the pipeline, where these differ."""
        return fields_of(self.response_format)
