"""The route /v1/completions: text in, text out. `vllm bench serve` uses it by default."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw, json
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import (
    DONE_EVENT,
    EVENTS,
    GOES_ON,
    LEAST_LOGPROB,
    Answer,
    AnswerResponse,
    ending,
    event,
    prompt_logprobs,
    usage_of_choices,
)
from omni_actors.http_server.bodies import JsonBody
from omni_actors.http_server.decoding import MAX_TOKEN_VALUES, decode
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.fields import MAX_TOKENS, OF_COMPLETIONS
from omni_actors.http_server.fields import Text as FieldText
from omni_actors.http_server.generation import Likeliest, Sampling
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.protocol.fields import TokenId
from omni_actors.protocol.payloads import PositionLogprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's
FIELDS: dict[str, str] = {ErrorCode.PROMPT_TOO_LONG: "prompt", ErrorCode.INVALID_PAYLOAD: "prompt"}

ONE = Meta(min_length=1, max_length=1)
TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS)]
PROMPT_FORMS = (FieldText, TokenIds, Annotated[list[FieldText], ONE], Annotated[list[TokenIds], ONE])
Prompt = Annotated[Raw, Meta(extra_json_schema={"anyOf": [json.schema(form) for form in PROMPT_FORMS]})]
AnyPrompt = FieldText | Annotated[list[FieldText | TokenId | TokenIds], Meta(max_length=MAX_TOKENS)]


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """Body of POST /v1/completions: one prompt, as text or token ids, or a list of that one prompt."""

    prompt: Prompt
    logprobs: Likeliest | None = None

    def likeliest(self) -> int | None:
        """OpenAI's `logprobs` is a number here."""
        return self.logprobs

    def text_or_tokens(self) -> str | list[int]:
        """Decode `prompt`. Raises `HttpError` unless it has one of the forms."""
        prompt: Any = decode(self.prompt, AnyPrompt, "prompt")  # type: ignore[arg-type]  # a union is no class
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if not prompt:
            raise bad_field("prompt", "The prompt is empty.")
        if isinstance(prompt, str):
            return prompt
        tokens = [token for token in prompt if isinstance(token, int)]
        if len(tokens) < len(prompt):
            raise bad_field("prompt", "Each request takes one prompt: a string, or a list of token ids.")
        return tokens


BODY = JsonBody(CompletionRequest, OF_COMPLETIONS, MAX_TOKEN_VALUES)


async def completions(request: Request, state: ServerState, body: CompletionRequest) -> Response:
    """Answer one prompt in text.

    A prompt of token ids goes to the model unchanged. A prompt of text becomes one user message in the chat template,
    the only form the model was trained on.
    """
    body.check()
    prompt = body.text_or_tokens()
    description, model = await state.model(body.model)
    answer = await Answer.begin(
        request,
        state,
        body,
        prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
        {**FIELDS, **body.error_fields()},
        modalities=["text"],
        params=state.stage_params(
            body.model, body.params_by_stage(), description, {"max_tokens": DEFAULT_MAX_TOKENS, **body.stage_fields()}
        ),
        n=body.answers(description.max_in_flight),
    )
    head: dict[str, Any] = {"id": f"cmpl-{request.state.request_id}", "object": "text_completion", "model": model}
    head["created"] = int(time.time())

    logprobs = [CompletionLogprobs() for _ in answer.usages]

    def choice(
        index: int, text: str, end: Mapping[str, Any], positions: Sequence[PositionLogprobs] = ()
    ) -> dict[str, Any]:
        return {"index": index, "text": text, **end, "logprobs": logprobs[index].piece(positions)}

    def finished(index: int) -> dict[str, Any]:
        return ending(answer.usages[index], description)

    async def events() -> AsyncIterator[bytes]:
        async for index, item in answer.choices():
            if isinstance(item, Text):
                yield event({**head, "choices": [choice(index, item.text, GOES_ON, item.logprobs)]})
            elif item is None:
                yield event({**head, "choices": [choice(index, "", finished(index))]})
        if body.stream_options and body.stream_options.include_usage:
            yield event({**head, "choices": [], "usage": usage_of_choices(answer.usages, description)})
        yield DONE_EVENT

    if body.stream:
        return AnswerResponse(answer, events(), EVENTS, state.settings.write_timeout)
    async with answer:
        texts: list[list[Text]] = [[] for _ in answer.usages]
        async for index, item in answer.choices():
            if isinstance(item, Text):
                texts[index].append(item)
        choices = [
            choice(
                index,
                "".join(item.text for item in items),
                finished(index),
                [position for item in items for position in item.logprobs],
            )
            for index, items in enumerate(texts)
        ]
        if body.prompt_logprobs is not None:  # each choice has the prompt's, as with vLLM
            of_prompt = prompt_logprobs([position for item in texts[0] for position in item.prompt_logprobs])
            choices = [{**made, "prompt_logprobs": of_prompt} for made in choices]
        whole = {**head, "choices": choices, "usage": usage_of_choices(answer.usages, description)}
        return json_response(whole)


class CompletionLogprobs:
    """The `logprobs` of a text completion's choice, piece by piece. Offsets count characters of the tokens' texts."""

    def __init__(self) -> None:
        self._offset = 0

    def piece(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any] | None:
        """The next positions; `None` for none."""
        if not positions:
            return None
        offsets = []
        for position in positions:
            offsets.append(self._offset)
            self._offset += len(position.token.text)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(position.token.logprob, LEAST_LOGPROB) for position in positions],
            "tokens": [position.token.text for position in positions],
            "top_logprobs": [
                {token.text: max(token.logprob, LEAST_LOGPROB) for token in (*position.top, position.token)}
                for position in positions
            ],
        }
