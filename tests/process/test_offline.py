"""`OmniLLM`: starts a pipeline, answers many prompts with parameters for each, and leaves nothing behind."""

from __future__ import annotations

import re
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

import pytest

from omni_actors.client import offline as llm
from omni_actors.client.offline import OmniLLM
from omni_actors.errors import ConfigError, EngineError, InvalidRequest, StartupError, UnknownModality, UnknownVoice
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.echo import FAIL_TOKEN
from tests.support.builders import chain, write
from tests.support.processes import assert_nothing_left

PROMPTS = ["abcd", "efgh", "ijkl"]


@pytest.fixture(scope="module")
def one_at_a_time():
    """An echo pipeline that admits one request at a time. All its stages take parameters, `prompt` too."""
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp") as folder:
        config = write(Path(folder), chain())
        with OmniLLM(config, {"coordinator.max_in_flight": 1}, startup_timeout=30) as omni:
            yield omni


def test_offline_answers_in_order_with_one_failing(short_path, monkeypatch):
    monkeypatch.setattr(llm, "short_temporary_folder", lambda: str(short_path))
    prompts = ["first", {"prompt_token_ids": [65, FAIL_TOKEN]}, "third", [{"role": "user", "content": "fourth"}]]
    prompts += [f"more {i}" for i in range(40)]
    with OmniLLM(write(short_path, chain()), {"coordinator.max_in_flight": 8}, startup_timeout=30) as omni:
        outputs = omni.generate(prompts, {"talker": {"max_tokens": 2}}, seed=1)
        assert omni.client.describe().in_flight == 0
        assert omni.generate("alone", modalities=["text"])[0].text == "alone"
    omni.close()
    assert isinstance(outputs[1].error, EngineError)
    texts = [output.text for output in outputs[:1] + outputs[2:]]
    assert texts == ["first", "third", "fourth", *prompts[4:]]
    assert all(len(output.audio) == 960 and output.error is None for output in outputs[:1] + outputs[2:])
    with pytest.raises(StartupError, match="closed"):
        omni.generate("x")
    assert_nothing_left(short_path)
    assert [entry.name for entry in short_path.iterdir()] == ["pipeline.yaml"]


def test_a_start_that_fails_says_why_and_keeps_the_logs(short_path, monkeypatch):
    monkeypatch.setattr(llm, "short_temporary_folder", lambda: str(short_path))
    with pytest.raises(ConfigError, match="Did you mean 'name'"):
        OmniLLM(write(short_path, {"nme": "x"}), startup_timeout=30)
    assert [entry.name for entry in short_path.iterdir()] == ["pipeline.yaml"]
    data = chain()
    data["stages"][1]["engine"] = {"fail_start": "cheese"}
    with pytest.raises(StartupError, match="cheese") as caught:
        OmniLLM(write(short_path, data), startup_timeout=30)
    assert_nothing_left(short_path)
    (kept,) = [entry for entry in short_path.iterdir() if entry.name != "pipeline.yaml"]
    assert f"The logs stay in {kept}." in str(caught.value)
    assert "cheese" in (kept / "logs" / "thinker-0.log").read_text()


def test_a_list_has_the_parameters_of_each_stage_in_order(one_at_a_time):
    by_stage = [None, {"max_tokens": 3}, StageParams(max_tokens=2), {}]
    for name in ("sampling_params", "sampling_params_list"):
        outputs = one_at_a_time.generate(PROMPTS[:2], **{name: by_stage})
        assert [output.text for output in outputs] == ["abc", "efg"]
        assert [len(output.audio) for output in outputs] == [960, 960]


def test_every_prompt_may_have_parameters_and_options_of_its_own(one_at_a_time):
    outputs = one_at_a_time.generate(
        PROMPTS,
        params_per_prompt=[{"thinker": {"max_tokens": 1}}, [None, None, {"max_tokens": 3}, None], None],
        modalities=[["text"], ["text", "audio"], None],
        voice=[None, "Ethan", "Nobody"],
        seed=[1, 2, None],
        request_id=["first", "second", "third"],
    )
    assert [output.request_id for output in outputs] == ["first", "second", "third"]
    assert [output.text for output in outputs] == ["a", "efgh", ""]
    assert outputs[0].audio is None
    assert len(outputs[1].audio) == 3 * 480
    assert isinstance(outputs[2].error, UnknownVoice)


def test_urgent_prompts_do_not_wait_behind_others(one_at_a_time):
    names = ["late", "middle", "urgent", "middle too"]
    outputs = one_at_a_time.generate(["x"] * 4, request_id=names, priority=[7, 0, -7, 0])
    assert [output.request_id for output in outputs] == names
    ended = [timeline.request_id for timeline in one_at_a_time.client.recent(4)]
    assert ended[::-1] == ["urgent", "middle", "middle too", "late"]


def test_a_progress_bar_counts_answered_prompts_and_one_that_fails_ends_the_call(one_at_a_time):
    make = unittest.mock.Mock()
    one_at_a_time.generate(["a", {"prompt_token_ids": [FAIL_TOKEN]}, "c"], use_tqdm=make)
    made, *used = make.mock_calls
    assert made == unittest.mock.call(total=3, desc="Processed prompts", dynamic_ncols=True)
    assert [str(call) for call in used] == ["call().update(1)"] * 3 + ["call().close()"], "failed ones included"
    make.return_value.update.side_effect = ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        one_at_a_time.generate(PROMPTS, use_tqdm=make)
    assert one_at_a_time.generate("abc")[0].text == "abc", "the only place is free again"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sampling_params": [{}, {}]}, "2 entries for 4 stages.*for each of these: prompt, thinker, talker, code2wav"),
    ({"sampling_params_list": 3}, "sampling_params_list is a mapping by stage name, or a list .* got 3"),
    ({"sampling_params": {"max_tokens": 3}}, "stage 'max_tokens'.* mapping such as .* got a int"),
    ({"sampling_params": {"thinker": {"max_tokns": 3}}}, "stage 'thinker'.*max_tokns"),
    ({"params_per_prompt": [{}]}, "one entry for each of the 3 prompts"),
    ({"params_per_prompt": {"thinker": {}}}, "params_per_prompt is a list with one entry"),
    ({"params_per_prompt": [None, None, [{}]]}, r"params_per_prompt\[2\] has 1 entries for 4 stages"),
    ({"sampling_params": {}, "params_per_prompt": [None] * 3}, "exclude one another"),
    ({"voise": "Ethan"}, "no option 'voise'. Did you mean 'voice'"),
    ({"voice": ["Ethan"]}, "voice has 1 values for 3 prompts"),
    ({"seed": [1, 2, "x"]}, "seed: Expected `int | null`, got `str`"),
    ({"priority": 9999}, "priority: Expected `int` <= 1000"),
    ({"use_tqdm": "yes"}, "use_tqdm is True, False or a class"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_argument_is_refused_by_name(one_at_a_time, arguments, message):
    with pytest.raises(InvalidRequest, match=re.compile(message, re.S)):
        one_at_a_time.generate(PROMPTS, **arguments)
    assert one_at_a_time.client.describe().in_flight == 0


def test_prompts_may_come_from_a_generator_and_be_none_at_all(one_at_a_time):
    outputs = one_at_a_time.generate(text for text in PROMPTS)
    assert [output.text for output in outputs] == PROMPTS
    assert one_at_a_time.generate([]) == []
    for prompts in (None, 7, Path("x")):
        with pytest.raises(InvalidRequest, match="neither a prompt nor a list of prompts"):
            one_at_a_time.generate(prompts)
    wrong = one_at_a_time.generate("x", modalities=["smell"])
    assert isinstance(wrong[0].error, UnknownModality), "what only the pipeline knows is in the output"
