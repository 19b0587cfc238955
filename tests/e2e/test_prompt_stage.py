"""The prompt stage around its processor: which request it takes next, and what it writes to its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_actors.engine.platform import prepare

prepare()

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.prompt import PromptEngine  # noqa: E402
from omni_actors.errors import InvalidRequest  # noqa: E402
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Prompt, StageParams  # noqa: E402
from omni_actors.stage.engine_interface import ErrorEvent, FinishedEvent, StageInputs, StageRequest  # noqa: E402

pytestmark = pytest.mark.e2e


def prompt_engine(checkpoint: Path, **options: str) -> PromptEngine:
    config = OmniModelConfig(str(checkpoint), "thinker")
    return PromptEngine(OmniEngineArgs(config, "prompt", engine={"max_model_len": 256, "dtype": "float32", **options}))


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[PromptEngine]:
    engine = prompt_engine(tiny_checkpoint)
    yield engine
    engine.shutdown()


def start(engine: PromptEngine, name: str, text: str = "hello", priority: int = 0) -> None:
    prompt = Prompt(messages=(ChatMessage("user", (ContentPart(text=text),)),))
    engine.start(StageRequest(name, StageParams(), 0, priority=priority), StageInputs(prompt=prompt))


def ends(engine: PromptEngine) -> list[str]:
    """The requests in the order in which they are finished."""
    found = []
    while engine.runnable():
        found += [event.request_id for event in engine.step() if isinstance(event, FinishedEvent)]
    return found


def test_prompts_are_processed_by_priority_and_arrival(engine: PromptEngine) -> None:
    for name, priority in {"first": 0, "gone": -2, "second": 0, "later": 1, "urgent": -1}.items():
        start(engine, name, priority=priority)
    with pytest.raises(InvalidRequest, match="already running"):
        start(engine, "second")
    engine.abort("gone")
    engine.abort("unknown")
    assert engine.counts() == {"requests": 4}
    assert ends(engine) == ["urgent", "first", "second", "later"]
    assert engine.counts() == {"requests": 0}


def test_prompts_are_processed_by_arrival_where_the_yaml_says_so(tiny_checkpoint: Path) -> None:
    engine = prompt_engine(tiny_checkpoint, scheduling_policy="fcfs")
    try:
        for name, priority in {"first": 0, "urgent": -1}.items():
            start(engine, name, priority=priority)
        assert ends(engine) == ["first", "urgent"]
    finally:
        engine.shutdown()


@pytest.mark.parametrize("fails", ["raise_exception(text)", "undefined_function(text)", "text / 2"])
def test_a_failing_prompt_is_not_quoted_in_the_log(
    engine: PromptEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    """A chat template is part of the checkpoint, and may fail in any way."""
    template = "{% set text = messages[0]['content'][0]['text'] %}{{ " + fails + " }}"
    monkeypatch.setattr(engine.processor, "chat_template", template)
    start(engine, "r", "my bank account is 4711")
    with caplog.at_level(logging.DEBUG):
        (event,) = engine.step()
    assert isinstance(event, ErrorEvent)
    assert "in _process" in caplog.text, "it says where it failed"
    assert "4711" not in caplog.text
