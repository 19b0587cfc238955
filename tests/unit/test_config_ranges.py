"""Every number of the configuration and every parameter of a request has a range, and errors say where they stand."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Meta

from omni_actors.config import PipelineConfig, check_parameters
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.echo import EchoOptions
from scripts import reference_docs
from tests.support.builders import chain, load


def refused(folder: Path, data: Any, overrides: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, data, overrides)
    return caught.value.message


def unbounded(annotation: Any, metas: tuple[Meta, ...] = ()) -> Iterator[Any]:
    """The numbers in a type that have no lower or no upper limit, and the texts that have no greatest length."""
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *found = typing.get_args(annotation)
        yield from unbounded(inner, (*metas, *(meta for meta in found if isinstance(meta, Meta))))
    elif annotation in (int, float):
        low = any(meta.ge is not None or meta.gt is not None for meta in metas)
        high = any(meta.le is not None or meta.lt is not None for meta in metas)
        if not (low and high):
            yield annotation
    elif annotation is str:
        if not any(meta.max_length is not None or meta.pattern is not None for meta in metas):
            yield annotation
    else:
        for argument in typing.get_args(annotation):
            yield from unbounded(argument)


SECTIONS = [*reference_docs.structs(PipelineConfig), ("stages.NAME.engine (echo)", EchoOptions)]


@pytest.mark.parametrize(("path", "section"), SECTIONS, ids=[path or "file" for path, _ in SECTIONS])
def test_every_number_has_a_range_and_every_text_a_length(path: str, section: type) -> None:
    hints = typing.get_type_hints(section, include_extras=True)
    assert hints
    found = {name: types for name, hint in hints.items() if (types := list(unbounded(hint)))}
    assert found == BOUNDED_BY_THE_READER.get(path, {})


BOUNDED_BY_THE_READER = {"stages.NAME": {"environment": [int], "engine": [str]}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"modle": "x"}, "modle: unknown key. Did you mean 'model'?"),
        ({"coordinator": {"max_inflight": 3}}, "unknown key. Did you mean 'max_in_flight'?"),
        (
            {"limits": {"message_bytes": 1 << 20}},
            "limits.message_bytes (1048576) is less than header_bytes, body_bytes",
        ),
        ({"http": {"bodies_bytes": 1 << 20}}, "http.bodies_bytes (1048576) is less than body_bytes (67108864)"),
        ({"flow": {"arena_bytes": 4096}}, "flow.arena_bytes (4096) must be at least 1048576, or 0"),
        (
            {"coordinator": {"heartbeat_interval": 3, "heartbeat_timeout": 7}},
            "stages.prompt.stall_timeout (4.25 s) must",
        ),
        ({"coordinator": {"otlp_endpoint": "collector"}}, "'collector' is not the URL of a collector"),
        ({"coordinator": {"listen": "tcp://a b:1"}}, "'tcp://a b:1' is neither 'ipc' nor tcp://ADDRESS:PORT"),
        ({"coordinator": {"listen": "tcp://127.0.0.1:70000"}}, "is neither 'ipc' nor tcp://ADDRESS:PORT"),
        ({"coordinator": {"run_dir": ""}}, "coordinator.run_dir: Expected `str` of length >= 1"),
        ({"coordinator": {"keys_dir": "~no-such-user/keys"}}, "there is no home folder for '~no-such-user/keys'"),
        ({"model": "~no-such-user/model"}, "model: there is no home folder for '~no-such-user/model'"),
        ({"model": f"/{'x' * 300}"}, "cannot be a path: File name too long"),
        ({"model": "two words"}, "model: there is no folder 'two words'"),
        ({"name": "two\nlines"}, "name: Expected `str` matching regex"),
        ({"cluster": {"master_addr": "a host"}}, "cluster.master_addr: Expected `str` matching regex"),
        ({"cluster": {"master_port": 0}}, "cluster.master_port: Expected `int` >= 1"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    assert problem in refused(tmp_path, {**chain(), **change})


@pytest.mark.parametrize(
    ("name", "text"), [("X=Y", "1"), ("lower", "1"), ("X", "a\0b"), ("X", [1]), ("X\n", "1"), ("X", "y" * 40_000)]
)
def test_environments_that_no_process_can_have(tmp_path: Path, name: str, text: Any) -> None:
    data = chain()
    data["stages"][0]["environment"] = {name: text}
    assert "pipeline.yaml, line " in refused(tmp_path, data)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  replicas: 0", "pipeline.yaml, line 5: stages.a.replicas: Expected `int` >= 1."),
        ("  replica: 1", "pipeline.yaml, line 5: stages.a.replica: unknown key. Did you mean 'replicas'?"),
        (
            "  outputs: [text, smell]",
            "pipeline.yaml, line 5: stages.a.outputs.1: there is no 'smell' here. "
            "Known: audio, image, latents, text, video, words.",
        ),
        ("  sampling: {top_p: 2}", "pipeline.yaml, line 5: stages.a.sampling.top_p: Expected `float` <= 1.0."),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, line: str, message: str) -> None:
    text = f"name: x\nmodel: echo\nstages:\n- {{name: b, kind: echo}}\n- name: a\n  kind: echo\n{line}\n"
    assert refused(tmp_path, text) == message.replace("line 5", "line 7")


@pytest.mark.parametrize("text", ["run #1", "~", "a: b", "[x", "123", "'quoted'", "no"])
def test_texts_of_the_environment_stand_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("OMNI_ACTORS_RUN_DIR", text)
    assert load(tmp_path, chain()).pipeline.coordinator.run_dir == text


def test_a_value_set_for_one_stage_does_not_change_those_that_share_its_anchor(tmp_path: Path) -> None:
    text = (
        "name: x\nmodel: echo\nstages:\n- {name: a, kind: echo, engine: &e {row_width: 1}}\n"
        "- {name: b, kind: echo, inputs: {from: a}, outputs: [text], engine: *e}\n"
    )
    pipeline = load(tmp_path, text, {"stages.a.engine.row_width": "2"}).pipeline
    assert msgspec.to_builtins([stage.engine for stage in pipeline.stages]) == [{"row_width": 2}, {"row_width": 1}]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kind", "autoregresive", "kind: there is no 'autoregresive' here. Did you mean 'autoregressive'?"),
        ("on_replica_loss", "replai", "on_replica_loss: there is no 'replai' here. Did you mean 'replay'?"),
        ("outputs", ["text", "txt"], "outputs.1: there is no 'txt' here. Did you mean 'text'?"),
        ("temprature", 0.5, "temprature: unknown key. Did you mean 'sampling.temperature'?"),
        ("replica", 2, "replica: unknown key. Did you mean 'replicas'?"),
        ("replicas", "two", "replicas: Expected `int`, got `str`."),
        ("devices", "all", "devices: Expected `array | null`, got `str`."),
        ("environment", [1], "environment: Expected `object`, got `array`."),
        ("inputs", {}, "inputs: Object missing required field `from`."),
    ],
)
def test_a_wrong_value_of_a_stage_is_named_with_the_nearest_one(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    data = chain()
    data["stages"][1][key] = value
    message = refused(tmp_path, data)
    assert "stages.thinker" in message
    assert said in message
    assert "$" not in message


WIDTH = Parameter("width", "int", least=64, most=2048, multiple_of=16)
DECLARED = (
    WIDTH,
    Parameter("guidance_scale", "float", least=1.0),
    Parameter("negative_prompt", "text", most=8),
    Parameter("mode", "text", choices=("soft", "hard")),
    Parameter("sharpen", "bool"),
    Parameter("layers", "int", multiple_of=2),
    Parameter("shift", "float", most=9.0),
)


@pytest.mark.parametrize(
    "params",
    [
        StageParams(),
        StageParams(width=1024, guidance_scale=1.0, negative_prompt="x" * 8, seed=7),
        StageParams(extra_args={"mode": "soft", "sharpen": True, "layers": -4, "shift": 3}),
    ],
)
def test_values_within_the_limits_are_taken(params: StageParams) -> None:
    check_parameters("dit", DECLARED, params)


@pytest.mark.parametrize(
    ("params", "field", "text"),
    [
        (StageParams(width=48), "width", "must be a multiple of 16 from 64 to 2048; got 48."),
        (StageParams(width=2064), "width", "must be a multiple of 16 from 64 to 2048; got 2064."),
        (StageParams(width=100), "width", "must be a multiple of 16 from 64 to 2048; got 100."),
        (StageParams(guidance_scale=0.5), "guidance_scale", "must be at least 1; got 0.5."),
        (StageParams(negative_prompt="x" * 9), "negative_prompt", "may have at most 8 characters; got 9."),
        (StageParams(height=64), "height", "has no parameter 'height'."),
        (StageParams(extra_args={"shft": 2.0}), "shft", "has no parameter 'shft'. Did you mean 'shift'?"),
        (StageParams(extra_args={"shift": float("nan")}), "shift", "must be at most 9; got nan."),
        (StageParams(extra_args={"shift": 9.5}), "shift", "must be at most 9; got 9.5."),
        (StageParams(extra_args={"shift": "3"}), "shift", "must be a number."),
        (StageParams(extra_args={"layers": 3}), "layers", "must be a multiple of 2; got 3."),
        (StageParams(extra_args={"layers": 2.0}), "layers", "must be a whole number."),
        (StageParams(extra_args={"layers": True}), "layers", "must be a whole number."),
        (StageParams(extra_args={"sharpen": 1}), "sharpen", "must be true or false."),
        (StageParams(extra_args={"mode": "loud"}), "mode", "must be one of soft, hard."),
    ],
)
def test_other_values_are_refused_with_the_name_and_the_limits(params: StageParams, field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_parameters("dit", DECLARED, params)
    assert caught.value.field == field
    assert text in caught.value.message
