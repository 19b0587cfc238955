"""A stage without a model that hears: a word in each quarter of a second, whatever is said.

As models do, it takes the beginning of a word for one, ends what it writes with a point, and goes on with a text that
was begun; a beginning that it would not have written fails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from omni_actors.config import PipelineConfig, StageConfig
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import FinishReason
from omni_actors.protocol.payloads import LANGUAGE, HearingAbility
from omni_actors.stage.engine_interface import (
    EngineEvent,
    EngineFacts,
    FinishedEvent,
    StageEngine,
    StageInputs,
    StageRequest,
    TextEvent,
)

WORD_SECONDS = 0.25
STEP_SECONDS = 0.03  # so that something is being written when a turn ends
WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett", "kilo", "lima")
STAGE: dict[str, Any] = {
    "name": "scribe",
    "kind": "custom",
    "engine_class": "tests.support.scribe.Scribe",
    "outputs": ["text"],
}


def heard(seconds: float) -> str:
    """What is written of sound of this length."""
    count, rest = divmod(seconds / WORD_SECONDS, 1)
    *words, last = islice(cycle(WORDS), int(count) + 1)
    return " ".join([*words, last[: int(rest * len(last))]]).strip() + "."


class Scribe(StageEngine):
    """The engine, which writes a word each step."""

    def __init__(self, pipeline: PipelineConfig, stage: StageConfig) -> None:
        self._writing: dict[str, tuple[str, list[str], int]] = {}

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(max_media={"audio": 1}, wants_information=(LANGUAGE,), hearing=HearingAbility(("English",)))

    def start(self, request: StageRequest, inputs: StageInputs) -> None:
        (media,), (*_, last) = inputs.prompt.media, inputs.prompt.messages
        begun = last.content[0].text or "" if last.role == "assistant" else ""
        text = heard(len(inputs.media[0].data) / 4 / media.sample_rate)
        if not text.startswith(begun):
            raise InvalidRequest(f"The text is {text!r} and does not begin with {begun!r}.")
        if begun and request.information.get(LANGUAGE) != "English":
            raise InvalidRequest("A text was begun in another language than it was heard in.")
        words = [word for word in text.removeprefix(begun).replace(" ", "| ").split("|") if word]
        language = "" if LANGUAGE in request.information else "English"
        self._writing[request.request_id] = (language, words, len(words))

    def extend(self, request_id: str, rows: Any = None, *, token_ids: Sequence[int] = (), complete: bool) -> None:
        """The sound comes as a whole."""

    def abort(self, request_id: str) -> None:
        self._writing.pop(request_id, None)

    def runnable(self) -> bool:
        return bool(self._writing)

    def step(self) -> Sequence[EngineEvent]:
        time.sleep(STEP_SECONDS)
        events: list[EngineEvent] = []
        for request_id, (language, words, count) in list(self._writing.items()):
            if words:
                events.append(TextEvent(request_id, words.pop(0), [0]))
            else:
                del self._writing[request_id]
                events.append(FinishedEvent(request_id, FinishReason.STOP, 1, count, language=language))
        return events

    def counts(self) -> dict[str, int]:
        return {"requests": len(self._writing)}

    def shutdown(self) -> None:
        self._writing.clear()
