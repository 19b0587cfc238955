"""A stage without a model that answers what it is asked to: with a real tokenizer, chat template and tool parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoTokenizer

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.engine.prompt_processors import ChatTemplate
from omni_actors.engine.tool_calls import ToolCallReader, parser_class
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import FinishReason
from omni_actors.stage.engine_interface import (
    EngineEvent,
    EngineFacts,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
    StreamEvent,
    TextEvent,
)
from tests.support.scripted import NEXT, SAY, SHOW


@dataclass
class _Script:
    request: StageRequest
    pieces: list[tuple[int, str]]  # tokens, each with the text that it adds
    calls: ToolCallReader | None
    prompt_tokens: int
    sent: int = 0
    streamed: int = 0


class ScriptedStage(StageEngine):
    """Has the names of parser and template from the pipeline, as the stages with models have."""

    def __init__(self, pipeline: PipelineConfig, stage: StageConfig) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(pipeline.model)
        self._template = ChatTemplate(self._tokenizer, pipeline.tool_call_parser, pipeline.tool_chat_template)
        self._parser = parser_class(str(pipeline.tool_call_parser), self._tokenizer)
        self._active: dict[str, _Script] = {}

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts()

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        prompt = inputs.prompt
        if prompt is None or not prompt.messages:
            raise InvalidRequest("A scripted stage needs messages.")
        rendered = self._template.render(prompt)
        asked = "".join(part.text or "" for part in prompt.messages[-1].content)
        if not asked:  # the user has spoken
            turns = sum(message.role == "user" for message in prompt.messages)
            asked = "".join(part.text or "" for part in prompt.messages[0].content).split(NEXT)[turns - 1]
        answer = asked.removeprefix(SAY) if asked != SHOW else rendered
        token_ids = self._tokenizer(answer)["input_ids"]
        texts = [self._tokenizer.decode(token_ids[:end]) for end in range(len(token_ids) + 1)]
        pieces = [
            (token, after[len(before) :]) for token, before, after in zip(token_ids, texts[:-1], texts[1:], strict=True)
        ]
        prompt_ids = self._tokenizer(rendered)["input_ids"]
        calls = None
        if prompt.tools is not None and prompt.tools.choice != "none":
            calls = ToolCallReader(self._parser, self._tokenizer, prompt.tools, prompt_ids)
        self._active[request.request_id] = _Script(request, pieces, calls, len(prompt_ids))

    def extend(self, *_: object, **__: object) -> None:
        raise InvalidRequest("A scripted stage takes its input at once.")

    def abort(self, request_id: str) -> None:
        self._active.pop(request_id, None)

    def runnable(self) -> bool:
        return bool(self._active)

    def step(self) -> Sequence[EngineEvent]:
        return [event for script in list(self._active.values()) for event in self._advance(script)]

    def _advance(self, script: _Script) -> list[EngineEvent]:
        request_id = script.request.request_id
        token, text = script.pieces[script.sent]
        script.sent += 1
        last = script.sent == len(script.pieces)
        if script.calls is None:
            events: list[EngineEvent] = [TextEvent(request_id, text, [token])]
            spoken = script.sent
        else:
            content, calls = script.calls.read(text, [token], last)
            events = [TextEvent(request_id, content, [token], calls)]
            spoken = script.calls.spoken
        if script.request.streams and (last or spoken > script.streamed):
            tokens = [token for token, _ in script.pieces[script.streamed : spoken]]
            events.append(StreamEvent(request_id, tokens, start=script.streamed, final=last))
            script.streamed = spoken
        if last:
            del self._active[request_id]
            events.append(FinishedEvent(request_id, FinishReason.STOP, script.prompt_tokens, script.sent))
        return events

    def counts(self) -> dict[str, int]:
        return {"requests": len(self._active)}

    def shutdown(self) -> None:
        self._active.clear()
