"""The recipes of docs/deploying.md are read by what would run them."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from omni_actors import config, launch
from tests.support.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "deploying.md").read_text()
SECTIONS = dict(re.findall(r"^##+ (.*?)\n(.*?)(?=^##+ |\Z)", PAGE, re.M | re.S))


def commands(section: str) -> list[list[str]]:
    """The commands of a section's shell blocks, in words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", SECTIONS[section], re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


GPUS = ("One GPU of 80 GB", "One GPU of 48 GB", "One GPU of 24 GB", "Two GPUs of 24 GB", "Two GPUs of 80 GB")


@pytest.mark.parametrize(
    "section", [*GPUS, "Slurm", "Kubernetes", "Open WebUI", "Many prompts from a file", "A cascade of models"]
)
def test_the_commands_of_a_recipe_parse_and_name_what_is_there(section: str) -> None:
    for words in commands(section):
        for word in words:
            if word.startswith(("launch/", "deploy/", "examples/")):
                assert (REPOSITORY / word).exists(), word
        if words[:2] == ["omni-actors", "launch"]:
            options = launch.parser().parse_args([word for word in words[2:] if word != "&"])
            config.load(options.config, launch.overrides(options), devices=2 if "Two" in section else 1)
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
