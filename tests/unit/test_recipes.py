"""The recipes of docs/deploying.md and the names of docs/migrating.md are read by what would run them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from omni_actors import config, launch
from omni_actors.config import PipelineConfig, StageConfig
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "deploying.md").read_text()
SECTIONS = dict(re.findall(r"^##+ (.*?)\n(.*?)(?=^##+ |\Z)", PAGE, re.M | re.S))
GPUS = {  # section -> number of GPUs, GiB of each
    "One GPU of 80 GB": (1, 74.5),
    "One GPU of 48 GB": (1, 44.7),
    "MiniCPM-o on one GPU of 48 GB": (1, 44.7),
    "One GPU of 24 GB": (1, 22.3),
    "Two GPUs of 24 GB": (2, 22.3),
    "Two GPUs of 80 GB": (2, 74.5),
}
MINICPM = "openbmb/MiniCPM-o-4_5"
# GiB: weights of the 7B model, from docs/benchmarks.md, and of MiniCPM-o, counted; and what vLLM's profile found to be
# needed with the 7B model's.
MEASURED = {"thinker": 16.78, "talker": 2.62}
COUNTED = {"thinker": 17.04, "talker": 0.37, "code2wav": 1.5}
WORKING = {"thinker": 2.36, "talker": 2.52}
ENCODERS = 2.6
SIZES = {  # of the thinker's language model: layers, width, width between, width of the keys, vocabulary
    "Qwen/Qwen2.5-Omni-7B": (28, 3584, 18944, 512, 152064),
    "Qwen/Qwen2.5-Omni-3B": (36, 2048, 11008, 256, 151936),
}
VOCODER = 4.7  # GiB, of 32 requests
POSITION_GIB, MINICPM_POSITION_GIB = 56 / 2**20, 144 / 2**20  # of a KV cache, at most
LEAST_CACHE = 0.8  # GiB


def thinker_gib(model: str, quantization: str | None = None) -> float:
    """Weights of a thinker: the layers' in one byte each with FP8, all others in two."""
    layers, width, between, keys, vocabulary = SIZES[model]
    linear = layers * (2 * width**2 + 2 * width * keys + 3 * width * between)
    return (linear * (1 if quantization else 2) + 4 * vocabulary * width) / 2**30 + ENCODERS


def needed_gib(pipeline: PipelineConfig, stage: StageConfig) -> float:
    """What a stage needs before its cache: weights and working memory. The 3B model's talker is no larger."""
    thinks = stage.part == "thinker"
    if pipeline.model == MINICPM:
        weights = COUNTED[stage.part]
    else:
        weights = thinker_gib(pipeline.model, stage.engine.get("quantization")) if thinks else MEASURED[stage.part]
    return weights + WORKING[stage.part]


def vocoder_gib(pipeline: PipelineConfig, stage: StageConfig) -> float:
    """What a vocoder needs, with what its answers keep."""
    if pipeline.model != MINICPM:
        return VOCODER
    return COUNTED[stage.part] + (stage.budget_bytes or 0) / 2**30


def commands(section: str) -> list[list[str]]:
    """The commands of a section's shell blocks, in words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", SECTIONS[section], re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def pipeline_of(section: str) -> PipelineConfig:
    (words,) = commands(section)
    assert words[:2] == ["omni-actors", "launch"]
    options = launch.parser().parse_args(words[2:])
    return config.load(options.config, launch.overrides(options), devices=GPUS[section][0]).pipeline


@pytest.mark.parametrize("section", GPUS)
def test_the_shares_of_a_recipe_fit_its_gpus(section: str) -> None:
    pipeline = pipeline_of(section)
    count, gib = GPUS[section]
    taken = dict.fromkeys(range(count), 0.0)
    for stage in pipeline.stages:
        for index in range(stage.processes):
            for device in config.replica_devices(stage, index, count):
                share = stage.engine.get("gpu_memory_utilization")
                taken[device] += share * gib if share is not None else vocoder_gib(pipeline, stage)
                if stage.part in WORKING:
                    room = share * gib - needed_gib(pipeline, stage)
                    position = MINICPM_POSITION_GIB if pipeline.model == MINICPM else POSITION_GIB
                    longest = stage.engine["max_model_len"] * position
                    assert room > max(LEAST_CACHE, longest), f"{stage.name} has no room for a KV cache"
    assert all(used <= gib for used in taken.values()), taken


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
