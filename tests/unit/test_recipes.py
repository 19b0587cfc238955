"""The recipes of docs/deploying.md and the names of docs/migrating.md are read by what would run them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from omni_actors import config, launch
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "deploying.md").read_text()
SECTIONS = dict(re.findall(r"^##+ (.*?)\n(.*?)(?=^##+ |\Z)", PAGE, re.M | re.S))
GPUS = {  # by section
    "One GPU of 80 GB": 1,
    "One GPU of 48 GB": 1,
    "MiniCPM-o on one GPU of 48 GB": 1,
    "One GPU of 24 GB": 1,
    "Two GPUs of 24 GB": 2,
    "Two GPUs of 80 GB": 2,
}


def commands(section: str) -> list[list[str]]:
    """The commands of a section's shell blocks, in words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", SECTIONS[section], re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize(("section", "gpus"), GPUS.items())
def test_a_recipe_is_a_pipeline_for_its_gpus(section: str, gpus: int) -> None:
    """Loading adds up the shares of each GPU's memory."""
    (words,) = commands(section)
    assert words[:2] == ["omni-actors", "launch"]
    options = launch.parser().parse_args(words[2:])
    pipeline = config.load(options.config, launch.overrides(options), devices=gpus).pipeline
    used = {device for stage in pipeline.stages for device in config.replica_devices(stage, stage.processes - 1, gpus)}
    assert used == set(range(gpus))


@pytest.mark.parametrize(
    "section",
    [
        *("Slurm", "Kubernetes", "Open WebUI", "Many prompts from a file"),
        "CosyVoice 2 in the voice of a recording",
        "A chat model that is spoken while it writes",
        "A cascade: a chat model that is spoken to, and spoken",
    ],
)
def test_the_commands_of_a_recipe_parse_and_name_what_is_there(section: str) -> None:
    for words in commands(section):
        for word in words:
            if word.startswith(("launch/", "deploy/", "examples/")):
                assert (REPOSITORY / word).exists(), word
        if words[:2] == ["omni-actors", "launch"]:
            launch.parser().parse_args([word for word in words[2:] if word != "&"])
    blocks = re.findall(r"^```bash\n(.*?)^```", SECTIONS[section], re.M | re.S)
    for block in blocks:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True, timeout=20)


def test_a_proxy_neither_buffers_nor_cuts_off_what_the_server_allows() -> None:
    (server,) = re.findall(r"^```nginx\n(.*?)^```", SECTIONS["Behind nginx"], re.M | re.S)
    assert server.count("{") == server.count("}") == 2
    directives = dict(re.findall(r"^ +(\w+) (.*);$", server, re.M))
    assert directives["proxy_buffering"] == "off"
    assert directives["client_max_body_size"] == "64m", "http.body_bytes"
    assert config.HttpConfig().body_bytes == 64 << 20
    assert int(directives["proxy_read_timeout"].removesuffix("s")) >= config.HttpConfig().request_timeout


MIGRATING = (REPOSITORY / "docs" / "migrating.md").read_text()


def test_the_yaml_after_the_move_is_valid_and_keeps_the_values(tmp_path: Path) -> None:
    before, after = re.findall(r"```yaml\n(.*?)```", MIGRATING, re.S)
    file = tmp_path / "pipeline.yaml"
    file.write_text(after)
    pipeline = config.load(file, devices=1).pipeline
    assert [stage.name for stage in pipeline.stages] == ["prompt", "thinker", "talker", "code2wav"]
    assert set(pipeline.modalities) == {"text", "audio"}
    for name, value in re.findall(r"(gpu_memory_utilization|temperature|top_k|top_p): ([\d.]+)", before):
        if value != "0.15":  # the vocoder's share, which has no counterpart
            assert f"{name}: {value}" in after
