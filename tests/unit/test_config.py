"""The pipeline's YAML: what is refused, with which words and line, what a text may cost, where values come from."""

from __future__ import annotations

import os
import tracemalloc
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Meta

from omni_actors import config, logs
from omni_actors.config import BUILT_IN_PROCESSORS, PipelineConfig, check_parameters, describe, memory_plan, yaml_reader
from omni_actors.config.yaml_reader import MAX_BYTES, read, read_file
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.protocol.payloads import Parameter, StageParams
from omni_actors.stage.echo import EchoOptions
from omni_actors.stage.processors import PROCESSORS, Passthrough, StreamProcessor
from scripts import reference_docs
from tests.support.builders import chain, load, write
from tests.support.paths import REPOSITORY


def refused(tmp_path: Path, data: Any, overrides: dict[str, str] | None = None, devices: int = 0) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, data, overrides, devices)
    return str(caught.value)


def with_stage(number: int, **fields: Any) -> dict[str, Any]:
    data = chain()
    data["stages"][number].update(fields)
    return data


def decoding(**options: Any) -> dict[str, Any]:
    return with_stage(3, kind="diffusion", decode=options)


def changed(**fields: Any) -> dict[str, Any]:
    return {**chain(), **fields}


HEARTBEATS = {"heartbeat_interval": 3, "heartbeat_timeout": 7}
REFUSED = [
    (with_stage(2, inputs={"from": "thinkr"}), "no stage 'thinkr'. Did you mean 'thinker'"),
    (with_stage(1, inputs={"from": ["prompt", "code2wav"]}), "cycle"),
    (with_stage(1, inputs={"from": "thinker"}), "cycle"),
    (with_stage(1, name="prompt"), "Two stages are called 'prompt'"),
    (with_stage(2, inputs=None), "Exactly one stage has no inputs"),
    (with_stage(1, inputs={"from": ["prompt", "prompt"]}), "names a stage twice"),
    (with_stage(2, inputs={"from": "thinker", "processor": "thinker2talkr"}), "Did you mean 'thinker2talker'"),
    (with_stage(3, outputs=[]), "its output goes nowhere"),
    (changed(stages=chain()["stages"][:1]), "No stage has outputs"),
    (with_stage(3, outputs=["text", "audio"]), "all output text"),
    (with_stage(1, kind="autoregressive", sampling={"num_steps": 3}), "thinker.sampling.num_steps does not apply"),
    (with_stage(0, kind="prompt", sampling={"max_tokens": 3}), "stages.prompt.sampling.max_tokens"),
    (
        with_stage(1, kind="autoregressive", outputs=[], sampling={"stop": ["."]}),
        "stages.thinker.sampling.stop does not apply to a stage without text",
    ),
    (decoding(polcy="whole"), "stages.code2wav.decode.polcy: unknown key. Did you mean 'policy'"),
    (decoding(policy="half"), "policy"),
    (decoding(first_blocks=0), "first_blocks"),
    (decoding(precision="int8"), "precision"),
    (decoding(policy="whole", first_blocks=2), "no chunks"),
    (decoding(first_blocks=4, largest_blocks=2), "largest_blocks (2) is less than first_blocks (4)"),
    (with_stage(3, decode={}), "only diffusion stages decode"),
    (with_stage(1, devices=[1]), "no device 1; this host has no GPU"),
    (with_stage(1, kind="custom"), "stages.thinker.engine_class is for stages of kind custom, and those need it"),
    (with_stage(1, engine_class="mine.Engine"), "for stages of kind custom"),
    (with_stage(1, kind="custom", engine_class="Engine"), "not the dotted path"),
    (with_stage(1, kind="custom", engine_class="os.Engine"), "outside the allowed import prefixes"),
    (changed(modle="x"), "modle: unknown key. Did you mean 'model'?"),
    (changed(coordinator={"max_inflight": 3}), "unknown key. Did you mean 'max_in_flight'?"),
    (
        changed(limits={"message_bytes": 1 << 20}),
        "limits.message_bytes (1048576) is less than header_bytes, body_bytes",
    ),
    (changed(http={"bodies_bytes": 1 << 20}), "http.bodies_bytes (1048576) is less than body_bytes (67108864)"),
    (changed(flow={"arena_bytes": 4096}), "flow.arena_bytes (4096) must be at least 1048576, or 0"),
    (changed(coordinator=HEARTBEATS), "stages.prompt.stall_timeout (4.25 s) must"),
    (changed(coordinator={"otlp_endpoint": "collector"}), "'collector' is not the URL of a collector"),
    (changed(coordinator={"listen": "tcp://a b:1"}), "'tcp://a b:1' is neither 'ipc' nor tcp://ADDRESS:PORT"),
    (changed(coordinator={"listen": "tcp://127.0.0.1:70000"}), "is neither 'ipc' nor tcp://ADDRESS:PORT"),
    (changed(model=f"/{'x' * 300}"), "cannot be a path: File name too long"),
    (changed(model="two words"), "model: there is no folder 'two words'"),
    (changed(name="two\nlines"), "name: Expected `str` matching regex"),
    (changed(cluster={"master_addr": "a host"}), "cluster.master_addr: Expected `str` matching regex"),
    (changed(cluster={"master_port": 0}), "cluster.master_port: Expected `int` >= 1"),
    *(
        (with_stage(0, environment={name: text}), "pipeline.yaml, line ")
        for name, text in (("X=Y", "1"), ("lower", "1"), ("X", "a\0b"), ("X", [1]), ("X\n", "1"), ("X", "y" * 40_000))
    ),
]


@pytest.mark.parametrize(("data", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_values_that_do_not_fit_are_refused_with_their_key(tmp_path: Path, data: dict[str, Any], problem: str) -> None:
    assert problem in refused(tmp_path, data)


def test_devices_that_this_host_does_not_have(tmp_path: Path) -> None:
    assert "this host has devices 0 to 1" in refused(tmp_path, with_stage(1, devices=[2]), devices=2)
    assert "names a device twice" in refused(tmp_path, with_stage(1, devices=[0, 0]), devices=2)
    load(tmp_path, with_stage(1, devices=[1]), devices=2)


@pytest.mark.parametrize("prefix", ["mine", "mine."])
def test_plugins_are_allowed_by_prefixes_of_whole_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    assert "plugins: 'mine' is outside the allowed" in refused(tmp_path, {**chain(), "plugins": ["mine"]})
    monkeypatch.setenv("OMNI_ACTORS_ALLOW_IMPORTS", prefix)
    load(tmp_path, {**chain(), "plugins": ["mine", "mine.models"]})
    assert "'mined.models' is outside" in refused(tmp_path, {**chain(), "plugins": ["mined.models"]})


def test_classes_are_resolved_by_name_or_allowed_path() -> None:
    assert set(BUILT_IN_PROCESSORS) == set(PROCESSORS), "so that a wrong name is known before anything is imported"

    def resolve(name: str) -> type:
        return config.resolve_class(name, PROCESSORS, StreamProcessor, "here")

    assert resolve("passthrough") is Passthrough
    assert resolve("omni_actors.stage.processors.Passthrough") is Passthrough
    for name, word in (
        ("pasthrough", "Did you mean"),
        ("omni_actors.stage.processors.Nothing", "cannot import"),
        ("omni_actors.nothing.X", "cannot import"),
        ("omni_actors.protocol.messages.Chunk", "not a subclass of StreamProcessor"),
        ("os.path", "outside"),
    ):
        with pytest.raises(ConfigError, match=word):
            resolve(name)


def test_only_loopback_is_bound(tmp_path: Path) -> None:
    for listen in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.168.1.2:1", "5555", "ipc:///tmp/x"):
        text = refused(tmp_path, {**chain(), "coordinator": {"listen": listen}})
        assert "coordinator.listen" in text
    for listen in ("tcp://127.0.0.1:5555", "tcp://127.0.0.2:0", "tcp://[::1]:5555"):
        load(tmp_path, {**chain(), "coordinator": {"listen": listen}})


def test_with_keys_other_hosts_may_connect(tmp_path: Path) -> None:
    listen = {"listen": "tcp://192.168.1.2:1"}
    ours = load(tmp_path, {**chain(), "coordinator": {**listen, "keys_dir": "keys"}}).pipeline
    assert ours.coordinator.keys_dir == str(tmp_path / "keys")  # next to the YAML that names it
    given = load(tmp_path, {**chain(), "coordinator": listen}, {"coordinator.keys_dir": "keys"}).pipeline
    assert given.coordinator.keys_dir == str(Path("keys").absolute())
    assert given.digest() == ours.digest()  # another host keeps them elsewhere
    for wrong in ("tcp://*:5555", "5555", "tcp://host", "ipc:///tmp/x"):
        text = refused(tmp_path, {**chain(), "coordinator": {"listen": wrong, "keys_dir": "keys"}})
        assert "coordinator.listen" in text


def test_several_hosts_need_keys(tmp_path: Path) -> None:
    cluster = {"nnodes": 2, "master_addr": "10.0.0.1"}
    text = refused(tmp_path, {**chain(), "cluster": cluster})
    assert "cluster.master_addr" in text
    assert "omni-actors keys" in text
    load(tmp_path, {**chain(), "cluster": cluster, "coordinator": {"keys_dir": "keys"}})
    for fine in ({**cluster, "nnodes": 1}, {**cluster, "master_addr": "127.0.0.2"}, {**cluster, "master_addr": "gpu1"}):
        load(tmp_path, {**chain(), "cluster": fine})


def autoregressive(share_of_thinker: Any, share_of_talker: Any, **talker: Any) -> dict[str, Any]:
    data = with_stage(1, kind="autoregressive", engine={"gpu_memory_utilization": share_of_thinker})
    data["stages"][2].update(kind="autoregressive", engine={"gpu_memory_utilization": share_of_talker}, **talker)
    return data


def test_memory_shares_must_fit(tmp_path: Path) -> None:
    text = refused(tmp_path, autoregressive(0.6, 0.5), devices=2)
    assert "GPU 0 is promised 1.10 of its memory: thinker 0.6, talker 0.5" in text
    load(tmp_path, autoregressive(0.6, 0.5, devices=[1]), devices=2)
    load(tmp_path, autoregressive(0.6, 0.5), devices=0)
    assert "1.20" in refused(tmp_path, autoregressive(0.6, 0.3, replicas=2), devices=1)
    pipeline = load(tmp_path, autoregressive(0.6, 0.4), devices=1).pipeline
    assert memory_plan(pipeline, 1) == {(0, 0): [("thinker", 0.6), ("talker", 0.4)]}
    for share in ("much", 0, 1.5, True, -0.1):
        text = refused(tmp_path, autoregressive(share, 0.1), devices=1)
        assert "stages.thinker.engine.gpu_memory_utilization must be a number" in text


def test_host_devices_follow_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path("/dev/nvidia0"), Path("/dev/nvidia1")])
    assert config.host_devices() == 2
    assert config.visible_devices([1, 0]) == ["1", "0"]
    for visible, count in (("", 0), ("-1", 0), ("1", 1), ("0,1,2", 2), ("1,-1,0", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert config.host_devices() == count
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-8f1c")
    assert config.visible_devices([0]) == ["4"]
    assert config.visible_devices([1, 0]) == ["GPU-8f1c", "4"]


def test_stages_are_set_by_name(tmp_path: Path) -> None:
    loaded = load(tmp_path, chain(), {"stages.talker.engine.step_seconds": "0.5", "stages.talker.replicas": "2"})
    assert loaded.pipeline.stage("talker").engine == {"step_seconds": 0.5}
    assert loaded.pipeline.stage("talker").replicas == 2
    assert "no stage 'talkr'. Did you mean 'talker'" in refused(tmp_path, chain(), {"stages.talkr.replicas": "2"})
    assert "Did you mean 'replicas'" in refused(tmp_path, chain(), {"stages.talker.replicass": "2"})
    assert "is not a mapping" in refused(tmp_path, chain(), {"name.x.y": "2"})
    assert "does not name a value" in refused(tmp_path, chain(), {"stages.x": "2"})
    assert "not valid YAML" in refused(tmp_path, chain(), {"name": "["})


def test_check_shows_every_value_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ACTORS_STARTUP_TIMEOUT", "5.5")
    data = autoregressive(0.5, 0.25)
    text = describe(load(tmp_path, data, {"stages.talker.replicas": "2"}, devices=1), devices=1)
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  stages") or "coord" in line}
    assert lines["stages.talker.replicas"].split()[1:] == ["2", "[command", "line]"]
    assert "5.5" in lines["coordinator.startup_timeout"]
    assert "[env OMNI_ACTORS_STARTUP_TIMEOUT]" in lines["coordinator.startup_timeout"]
    assert lines["stages.thinker.kind"].endswith("[yaml pipeline.yaml]")
    assert lines["coordinator.max_in_flight"].endswith("[default]")
    assert "  thinker: 1 x autoregressive on GPU 0, takes input from prompt" in text
    assert "  prompt: 1 x echo on CPU, takes input from the client" in text
    assert "memory of GPU 0: thinker 0.5 + talker 0.5 = 1.00" in text


def test_model_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "sibling").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "local").mkdir()

    def model(value: str) -> str:
        return config.load(write(tmp_path / "configs", {**chain(), "model": value}), devices=0).pipeline.model

    assert model("../sibling") == str(tmp_path / "sibling")
    assert model("local") == str(tmp_path / "here" / "local")
    assert model(str(tmp_path / "here")) == str(tmp_path / "here")
    assert model("Qwen/Qwen2.5-Omni-7B") == "Qwen/Qwen2.5-Omni-7B"
    for missing in ("./nothing", "../nothing", "/nothing", "~/nothing"):
        with pytest.raises(ConfigError, match="there is no folder"):
            model(missing)


def test_log_level_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_ACTORS_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOUD"):
        logs.configure("test")


def test_one_client_behind_one_address_has_128_answers_at_a_time() -> None:
    """All requests over HTTP are those of one client, and all from one address those of one tenant."""
    pipeline = config.load(REPOSITORY / "stage_configs" / "qwen2_5_omni.yaml", {}, devices=1).pipeline
    assert pipeline.coordinator.max_in_flight >= 256, "of which one tenant gets 225 (test_slots.py)"
    text = pipeline.stage("thinker").engine["max_num_seqs"]
    assert min(pipeline.http.connections, pipeline.flow.backlog_requests, text) >= 128


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


def test_an_error_names_the_line(tmp_path: Path) -> None:
    text = "name: x\nmodel: echo\nstages:\n- {name: b, kind: echo}\n- name: a\n  kind: echo\n  outputs: [text, smell]\n"
    assert refused(tmp_path, text).startswith(
        "pipeline.yaml, line 7: stages.a.outputs.1: there is no 'smell' here. "
        "Known: audio, image, latents, text, video, words."
    )


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
        (StageParams(width=100), "width", "must be a multiple of 16 from 64 to 2048; got 100."),
        (StageParams(guidance_scale=0.5), "guidance_scale", "must be at least 1; got 0.5."),
        (StageParams(negative_prompt="x" * 9), "negative_prompt", "may have at most 8 characters; got 9."),
        (StageParams(height=64), "height", "has no parameter 'height'."),
        (StageParams(extra_args={"shft": 2.0}), "shft", "has no parameter 'shft'. Did you mean 'shift'?"),
        (StageParams(extra_args={"shift": float("nan")}), "shift", "must be at most 9; got nan."),
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


MIB = 1 << 20


def value(text: str) -> Any:
    return read(text, "f.yaml").value


def unreadable(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, "f.yaml")
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("# nothing but a comment", None),
        ("[~, null, yes, Off, TRUE, y]", [None, None, True, False, True, "y"]),
        ("[0, -3, +4, 1_000, 0x1f]", [0, -3, 4, 1000, 31]),
        ("[1.5, .5, 2., 1e3, -2.5e-3, 1E-4]", [1.5, 0.5, 2.0, 1000.0, -0.0025, 0.0001]),
        ("['5', \"yes\", !!str 5, '']", ["5", "yes", "5", ""]),
        ("[2026-11-22, 2026-11-22 10:00:00, =, <<]", ["2026-11-22", "2026-11-22 10:00:00", "=", "<<"]),
        ("{on: 1, 2026-11-22: 2, 5: 3}", {"on": 1, "2026-11-22": 2, "5": 3}),
        ("a: |\n  two\n  lines\n", {"a": "two\nlines\n"}),
    ],
)
def test_values_are_what_json_could_hold(text: str, expected: Any) -> None:
    assert value(text) == expected


def test_a_document_knows_on_which_line_its_values_stand() -> None:
    document = read("a: 1\nb:\n  - c: 2\n    d: 3\n", "f.yaml")
    assert document.line(("a",)) == 1
    assert document.line(("b", 0, "d")) == 4
    assert document.line(("b", 0, "missing")) == 3, "the nearest that holds it"
    assert document.line(("missing",)) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "line 2: not valid YAML: "),
        ("a: 1\na: 2", "line 2: the key 'a' is given twice"),
        ("{<<: {}, <<: {}}", "line 1: the key '<<' is given twice"),
        ("a: 1\n---\nb: 2", "line 2: not valid YAML: expected a single document"),
        ("a: 1\n%YAML 1.2\n---\n", "line 2: directives are not supported"),
        ("a: !!python/object:os.system x", "line 1: the tag 'tag:yaml.org,2002:python/object:os.system' is not"),
        ("a: !!set {b}", "the tag 'tag:yaml.org,2002:set' is not supported"),
        ("a: !!int ''", "'' is no int"),
        ("a: !!bool maybe", "'maybe' is no bool"),
        ("? [a]\n: b", "line 1: a key must be a text"),
        ("a: .nan", "line 1: .nan is not a finite number"),
        ("a: 1e999", "1e999 is not a finite number"),
        (f"a: {'9' * 6000}", f"'{'9' * 80}' is no int"),
        (f"a: 1{'0' * 30}", f"the number 1{'0' * 30} does not fit in 64 bits"),
        ('a: "x\\0"', r"line 1: the control character '\x00' is not allowed"),
        ('"\\x1b": a', r"line 1: the control character '\x1b' is not allowed"),
        ('a: "\\ud800"', "line 1: "),
        ("a: *b", "line 1: not valid YAML: found undefined alias"),
        ("a: &a [*a]", "more than 50 levels"),
        ("a: {<<: 5}", "line 1: << takes a mapping"),
    ],
)
def test_what_is_refused_is_named_with_its_line(text: str, problem: str) -> None:
    message = unreadable(text)
    assert message.startswith("f.yaml, line ")
    assert problem in message


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "missing", "endless name", "latin-1", "UTF-16"])
def test_only_regular_files_of_text_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("x" * 300 if kind == "endless name" else "f.yaml")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # without a writer, for which an ordinary open() would wait
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind in ("latin-1", "UTF-16"):
        path.write_text("a: ä", encoding=kind)
    with pytest.raises(ConfigError, match=r"regular file|cannot read|not encoded in UTF-8"):
        read_file(path)


REPEATED = "values and characters, with those that aliases repeat"


def bomb(form: str) -> str:
    inner = ("{x: 1}", *(f"*{name}" for name in "abcdefgh"))
    return "\n".join(
        f"{name}: &{name} {form.format(','.join([item] * 10))}" for name, item in zip("abcdefghi", inner, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 600 + "]" * 600, "line 1: more than 50 levels"),
        ("[" * 60_000 + "]" * 60_000, "f.yaml"),
        ("\n".join(" " * n + "a:" for n in range(400)), "line 51: more than 50 levels"),
        (f"a: &a {'[' * 30}{']' * 30}\nb: {'[' * 30}*a{']' * 30}", "more than 50 levels"),
        (bomb("[{}]"), REPEATED),
        (bomb("{{<<: [{}]}}"), REPEATED),
        (f"a: &a {'x' * 10_000}\nb: [{','.join(['*a'] * 200)}]", REPEATED),
        (f"a: &a {{? {'x' * 10_000}}}\nb: [{','.join(['*a'] * 200)}]", REPEATED),
        ("x" * (MAX_BYTES + 1), "has more than 128 KiB"),
        ("".join(f"%TAG !a{n}! b\n" for n in range(8000)), "directives are not supported"),
    ],
    ids=["flow", "deeper", "indent", "alias depth", "bomb", "merges", "text bomb", "key bomb", "bytes", "directives"],
)
def test_no_text_can_cost_much(text: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What aliases repeat is limited to an eighth of what it usually is, as counting memory takes long."""
    monkeypatch.setattr(yaml_reader, "MAX_SIZE", yaml_reader.MAX_SIZE // 8)
    tracemalloc.start()
    try:
        assert problem in unreadable(text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < (8 if problem == REPEATED else 64) * MIB
