"""The first stage: turns chat messages into token ids. `kind: prompt` supports omni checkpoints only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from transformers import AutoTokenizer

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.fields import HostTensor, unpack_token_ids
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import Prompt
from omni_actors.stage.engine_interface import (
    EngineEvent,
    EngineFacts,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
    StreamEvent,
)


class Tokenize(StageEngine):
    """Tokenizes one prompt per step, with the checkpoint's chat template."""

    def __init__(self, pipeline: PipelineConfig, stage: StageConfig) -> None:
        if stage.engine:
            raise ConfigError(f"stages.{stage.name}.engine: this stage has no options.")
        self._tokenizer = AutoTokenizer.from_pretrained(pipeline.model)
        self._waiting: deque[tuple[str, list[int]]] = deque()

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts()

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        if inputs.prompt is None or inputs.prompt.media:
            raise InvalidRequest("This model takes text only.")
        self._waiting.append((request.request_id, self._token_ids(inputs.prompt)))

    def extend(
        self, request_id: str, rows: HostTensor | None = None, *, token_ids: Sequence[int] = (), complete: bool
    ) -> None:
        raise InvalidRequest("A prompt comes as a whole.")

    def abort(self, request_id: str) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)

    def runnable(self) -> bool:
        return bool(self._waiting)

    def step(self) -> Sequence[EngineEvent]:
        request_id, token_ids = self._waiting.popleft()
        return [
            StreamEvent(request_id, token_ids, final=True),
            FinishedEvent(request_id, FinishReason.STOP, 0, len(token_ids)),
        ]

    def counts(self) -> dict[str, int]:
        return {"requests": len(self._waiting)}

    def shutdown(self) -> None:
        self._waiting.clear()

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if prompt.token_ids:
            return unpack_token_ids(prompt.token_ids)
        messages = [
            {"role": message.role, "content": "".join(part.text or "" for part in message.content)}
            for message in prompt.messages
        ]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text)["input_ids"])
