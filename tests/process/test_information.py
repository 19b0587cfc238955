"""What a client sends besides the prompt arrives intact in every stage that wants it, also after a loss."""

from __future__ import annotations

import json
from typing import Any

import numpy
import psutil
import pytest

from omni_actors.client import OmniClient
from omni_actors.client.streams import OmniRequestOutput
from omni_actors.errors import InvalidRequest
from omni_actors.protocol.fields import DType, HostTensor
from tests.support.builders import write
from tests.support.nightly import nightly
from tests.support.pipelines import RunningPipeline
from tests.support.waiting import until
from tests.support.witness import ENVIRONMENT, PIPELINE, told_values

EMBEDS = numpy.random.default_rng(0).standard_normal((300, 4)).astype(numpy.float16)
TABLE = numpy.arange(100_000, dtype=numpy.int64).reshape(100, 1000)  # large enough for shared memory
HOST_TABLE = HostTensor(DType.I64, TABLE.shape, TABLE.tobytes())
INFORMATION: dict[str, Any] = {
    "both": 1,
    "first": "only the source",
    "speed": 1.5,
    "names": ["x", 2, 2.5, False],
    "table": TABLE,
    "processor": TABLE[:2],
}
HOST_ROWS = HostTensor(DType.I64, (2, 1000), TABLE[:2].tobytes())


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    config = write(tmp_path_factory.mktemp("witness"), PIPELINE)
    with RunningPipeline(config, environment=ENVIRONMENT) as pipeline:
        yield pipeline


def assert_intact(output: OmniRequestOutput, more: dict[str, Any] | None = None) -> None:
    said = json.loads(output.text)
    values = {**INFORMATION, "table": HOST_TABLE, "processor": HOST_ROWS}
    to_sink = {name: values[name] for name in ("both", "speed", "names", "table", "processor")}
    to_sink |= {name: value for name, value in (more or {}).items() if name == "pause sink"}
    to_source = {name: values[name] for name in ("both", "first")}
    to_source |= {name: value for name, value in (more or {}).items() if name == "pause source"}
    assert said["information"] == told_values(to_sink)
    assert json.loads(said["inputs"]["in the processor"]) == told_values(to_sink)
    assert json.loads(said["inputs"]["in the source"]) == told_values(to_source)
    assert said["inputs"]["of the source"] == ["a", 1, 2.5, True]
    embeds = HostTensor(DType.F16, EMBEDS.shape, EMBEDS.tobytes())
    assert said["inputs"]["prompt_embeds"] == told_values({"": embeds})[""]


def test_embeddings_scalars_lists_and_tensors_reach_engines_and_processors(pipeline):
    """Two stages after the client's entry stage, and from the entry stage on to the last one."""
    with OmniClient(pipeline.endpoint) as client:
        assert_intact(client.generate({"prompt_embeds": EMBEDS, "additional_information": INFORMATION}, timeout=30))
        assert_intact(client.generate({"prompt_embeds": EMBEDS}, additional_information=INFORMATION, timeout=30))
    pipeline.assert_idle()


def test_what_no_stage_wants_is_refused_with_its_name(pipeline):
    with OmniClient(pipeline.endpoint) as client:
        with pytest.raises(InvalidRequest, match=r"source, between, sink wants 'sped'\. Did you mean 'speed'"):
            client.generate({"prompt_embeds": EMBEDS, "additional_information": {"sped": 1}}, timeout=30)
        with pytest.raises(InvalidRequest, match="prompt_embeds have 3 values per position; this model takes 4"):
            client.generate({"prompt_embeds": EMBEDS[:, :3].copy()}, timeout=30)
    pipeline.assert_idle()


@pytest.mark.parametrize("stage", ["sink", nightly("source")])
def test_a_stage_that_is_killed_gets_everything_again(pipeline, stage):
    more = {f"pause {stage}": 1.0}
    with OmniClient(pipeline.endpoint) as client:

        def at_work() -> list[int]:
            found = [item for item in client.describe().stages if item.stage == stage and item.state == "ready"]
            return [item.pid for item in found if item.counts.get("engine_requests")]

        prompt = {"prompt_embeds": EMBEDS, "additional_information": {**INFORMATION, **more}}
        stream = client.submit(prompt, timeout=60)
        until(at_work)
        psutil.Process(at_work()[0]).kill()
        assert_intact(stream.result(), more)
        assert client.describe().counts["replays"] > 0
    pipeline.assert_idle()
