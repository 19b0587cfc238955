"""The route /v1/completions: text in, text out. `vllm bench serve` uses it by default."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client import Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import DONE_EVENT, GOES_ON, Answer, AnswerResponse, ending, event, usage_of_choices
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.json_body import JsonBody
from omni_actors.http_server.json_bounds import MAX_TOKEN_VALUES
from omni_actors.http_server.logprobs import CompletionLogprobs, prompt_logprobs
from omni_actors.http_server.schemas import CompletionRequest
from omni_actors.http_server.state import State
from omni_actors.protocol.payloads import PositionLogprobs

router = APIRouter()
BODY = JsonBody(CompletionRequest, MAX_TOKEN_VALUES)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
FIELDS: dict[str, str] = {ErrorCode.PROMPT_TOO_LONG: "prompt", ErrorCode.INVALID_PAYLOAD: "prompt"}


@router.post("/v1/completions", response_class=Response, openapi_extra=BODY.openapi())
async def completions(body: Annotated[CompletionRequest, Depends(BODY)], request: Request, state: State) -> Response:
    """Answer one prompt in text.

    A prompt of token ids goes to the model unchanged. A prompt of text becomes one user message in the chat template,
    the only form the model was trained on.
    """
    body.refuse_unsupported()
    prompt = body.text_or_tokens()
    description = await state.facts(body.model)
    model = state.model_name(body.model, description)
    fields = {"max_tokens": DEFAULT_MAX_TOKENS, **body.stage_fields()}
    params = state.stage_params(body.params_by_stage(), description, state.adapted(model, description, fields))
    answer = await Answer.begin(
        request,
        state,
        prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
        {**FIELDS, **body.error_fields()},
        modalities=["text"],
        params=params,
        seed=body.seed,
        priority=body.priority or 0,
        timeout=body.timeout,
        n=body.answers(description.max_in_flight),
    )
    head = {
        "id": f"cmpl-{request.state.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }

    logprobs = [CompletionLogprobs() for _ in answer.usages]

    def choice(
        index: int, text: str, end: Mapping[str, Any], positions: Sequence[PositionLogprobs] = ()
    ) -> dict[str, Any]:
        return {"index": index, "text": text, **end, "logprobs": logprobs[index].piece(positions)}

    def finished(index: int) -> dict[str, Any]:
        return ending(answer.usages[index], description)

    async def events() -> AsyncIterator[bytes]:
        try:
            async for index, item in answer.choices():
                if isinstance(item, Text):
                    yield event({**head, "choices": [choice(index, item.text, GOES_ON, item.logprobs)]})
                elif item is None:
                    yield event({**head, "choices": [choice(index, "", finished(index))]})
        except HttpError as error:
            yield event(error.body())
            return
        if body.stream_options and body.stream_options.include_usage:
            yield event({**head, "choices": [], "usage": usage_of_choices(answer.usages, description)})
        yield DONE_EVENT

    if body.stream:
        return AnswerResponse(answer, events(), "text/event-stream", state.settings.write_timeout)
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
        return Response(msgspec.json.encode(whole), media_type="application/json")
