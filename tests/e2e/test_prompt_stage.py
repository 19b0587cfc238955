"""The prompt stage around its processor: which request it takes next, and what it writes to its log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from omni_actors.engine.platform import prepare

prepare()

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.prompt import PromptEngine  # noqa: E402
from omni_actors.errors import InvalidRequest  # noqa: E402
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams  # noqa: E402
from omni_actors.protocol.tensors import DType, HostTensor, TensorRef  # noqa: E402
from omni_actors.stage.engine_interface import ErrorEvent, FinishedEvent, StageInputs, StageRequest  # noqa: E402
from tests.support.waiting import until  # noqa: E402

pytestmark = pytest.mark.e2e


def prompt_engine(checkpoint: Path, **options: Any) -> PromptEngine:
    config = OmniModelConfig(str(checkpoint), "thinker")
    return PromptEngine(OmniEngineArgs(config, "prompt", engine={"max_model_len": 256, "dtype": "float32", **options}))


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[PromptEngine]:
    engine = prompt_engine(tiny_checkpoint, limit_mm_per_prompt={"image": 1, "audio": 2, "video": 0})
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


def start_with_sound(engine: PromptEngine, name: str, priority: int = 0, count: int = 1) -> None:
    """A request whose audio a decoder has to resample."""
    samples = np.zeros(8000, np.float32)
    tensor = HostTensor(DType.F32, samples.shape, samples.tobytes())
    media = (Media("audio", MediaEncoding.ARRAY, TensorRef(DType.F32, tensor.shape, 0), sample_rate=8000),) * count
    prompt = Prompt(messages=(ChatMessage("user", tuple(ContentPart(media=i) for i in range(count))),), media=media)
    inputs = StageInputs(prompt=prompt, media=[tensor] * count)
    engine.start(StageRequest(name, StageParams(), 0, priority=priority), inputs)


def next_end(engine: PromptEngine) -> str:
    """The next request that is finished, waiting for it if need be."""
    events = until(engine.step, 60.0)
    assert isinstance(events[-1], FinishedEvent), events
    return events[-1].request_id


@pytest.fixture
def stopped(engine: PromptEngine) -> Iterator[psutil.Process]:
    """The decoder that the next media come to, stopped, as if it were busy with a file for ever."""
    start_with_sound(engine, "first")
    assert next_end(engine) == "first"
    assert not engine.busy()
    process = psutil.Process(engine.decoder_pids[-1])
    process.suspend()
    yield process
    if process.is_running():
        process.resume()
    while engine.busy() or engine.runnable():
        engine.step()


def test_media_that_are_decoded_do_not_stop_the_stage(engine: PromptEngine, stopped: psutil.Process) -> None:
    woken = threading.Event()
    engine.on_progress(woken.set)
    start_with_sound(engine, "sound", priority=-1)
    for name in ("text", "another text"):
        start(engine, name)
    start_with_sound(engine, "another sound")  # on the other thread
    assert sorted(next_end(engine) for _ in range(3)) == ["another sound", "another text", "text"]
    assert engine.counts() == {"requests": 1}
    assert engine.busy()
    assert not engine.runnable()
    woken.clear()
    stopped.resume()
    assert woken.wait(60), "the loop is woken when it can go on"
    assert engine.runnable()
    assert next_end(engine) == "sound"


def test_an_abort_ends_what_decodes_its_media(engine: PromptEngine, stopped: psutil.Process) -> None:
    start_with_sound(engine, "sound")
    engine.abort("sound")
    assert engine.counts() == {"requests": 0}
    until(lambda: not stopped.is_running(), what="the decoder has ended")
    until(engine.runnable, what="the thread is free")
    assert list(engine.step()) == []
    start_with_sound(engine, "sound")
    assert next_end(engine) == "sound"


def test_media_wait_for_a_thread_by_priority(engine: PromptEngine, stopped: psutil.Process) -> None:
    start_with_sound(engine, "hanging")
    for name, priority in {"running": 0, "last": 1, "urgent": -1, "second": 0}.items():
        start_with_sound(engine, name, priority)
    assert [next_end(engine) for _ in range(4)] == ["running", "urgent", "second", "last"]
    engine.abort("hanging")


def test_more_media_than_a_prompt_may_have_are_refused_before_any_is_decoded(engine: PromptEngine) -> None:
    assert engine.facts.max_media == {"image": 1, "audio": 2, "video": 0}
    with pytest.raises(InvalidRequest, match="3 media of the kind audio; at most 2"):
        start_with_sound(engine, "many", count=3)
    assert not engine.busy()


@pytest.mark.parametrize("fails", ["raise_exception(text)", "undefined_function(text)", "text / 2"])
def test_a_failing_prompt_is_not_quoted_in_the_log(
    engine: PromptEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    """A chat template is part of the checkpoint, and may fail in any way."""
    template = "{% set text = messages[0]['content'][0]['text'] %}{{ " + fails + " }}"
    monkeypatch.setattr(engine.prompts.processor, "chat_template", template)
    start(engine, "r", "my bank account is 4711")
    with caplog.at_level(logging.DEBUG):
        (event,) = engine.step()
    assert isinstance(event, ErrorEvent)
    assert "in process" in caplog.text, "it says where it failed"
    assert "4711" not in caplog.text
