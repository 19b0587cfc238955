"""The worked example of docs/extending.md: a stage with a custom engine in a pipeline of real processes."""

from __future__ import annotations

import os
import re

import numpy
import pytest

from omni_actors import config
from omni_actors.client import OmniClient
from omni_actors.errors import Aborted, InvalidRequest
from tests.support.commands import python
from tests.support.paths import EXAMPLE_MODULES, REPOSITORY
from tests.support.pipelines import RunningPipeline

EXAMPLE = REPOSITORY / "examples" / "custom_stage"
ENVIRONMENT = {**EXAMPLE_MODULES, "OMNI_ACTORS_ALLOW_IMPORTS": "custom_stage"}


@pytest.fixture(scope="module")
def pipeline():
    with RunningPipeline(EXAMPLE / "echo.yaml", environment=ENVIRONMENT) as pipeline:
        yield pipeline


def test_the_client_hears_the_custom_stages_sound(pipeline):
    """The vocoder of the echo gives each token the loudness token / 256."""
    prompt = "aaaaz!" * 20
    with OmniClient(pipeline.endpoint) as client:
        output = client.generate(prompt, voice="Ethan", timeout=30)
        assert client.describe().voices == ("Chelsie", "Ethan"), "those of the vocoder"
    assert output.text == prompt
    assert output.sample_rate == 24_000
    loudness = output.audio.reshape(len(prompt), 480)
    assert loudness.max() == pytest.approx(0.8), "as the YAML asks for"
    assert loudness[0] == pytest.approx(numpy.full(480, 0.8)), "from the first sample on"
    quiet = numpy.array([ord(token) / 256 for token in prompt])
    assert (loudness.min(axis=1) > quiet).all(), "never quieter than it was"
    assert output.usage["leveller"].output_tokens == len(prompt), "piece by piece"
    pipeline.assert_idle()


def test_the_documented_additional_information_reaches_the_custom_stage(pipeline):
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "client.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if "peak" in block]
    done = python("-c", block.replace("ipc:///tmp/omni-x/client", pipeline.endpoint))
    assert done.returncode == 0, done.stderr
    loudness, wrong_key, wrong_name = done.stdout.splitlines()
    assert loudness == "0.20"
    assert wrong_key == "A prompt has no 'prompt_token_id'. Did you mean 'prompt_token_ids'?"
    assert wrong_name.endswith("leveller wants 'peek'. Did you mean 'peak'?")
    with OmniClient(pipeline.endpoint) as client, pytest.raises(InvalidRequest, match=r"'peak'\] must be a number"):
        client.generate("x", additional_information={"peak": "loud"}, timeout=30)


def test_requests_share_the_custom_stage_and_an_abort_reaches_it(pipeline):
    with OmniClient(pipeline.endpoint) as client:
        gone = client.submit("w" * 4000, timeout=30)
        streams = [client.submit(letter * 50, timeout=30) for letter in "!az"]
        for stream in streams:
            assert stream.result().audio == pytest.approx(numpy.full(50 * 480, 0.8))
        gone.abort()
        with pytest.raises(Aborted):
            gone.result()
    pipeline.assert_idle()


def test_a_wrong_option_ends_the_start_with_its_name():
    command = ("-m", "omni_actors.launch", str(EXAMPLE / "echo.yaml"), "--set", "stages.leveller.engine.peek=1")
    done = python(*command, "--prompt", "x", env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 1
    assert "stages.leveller.engine.peek is no option of the leveller. Did you mean 'peak'?" in done.stderr
    assert "did not stop" not in done.stderr, "the other stages, which had just been forked"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_configurations_of_the_examples_load(path, monkeypatch):
    monkeypatch.setenv("OMNI_ACTORS_ALLOW_IMPORTS", path.parent.name)
    pipeline = config.load(path, {"model": "echo"}, devices=0).pipeline
    classes = [stage.engine_class for stage in pipeline.stages if stage.engine_class]
    assert path.parent.name in [*pipeline.plugins, *(name.partition(".")[0] for name in classes)], "its own code"
