"""The command line's arguments; what they start is in tests/process."""

from __future__ import annotations

import pytest

from omni_actors import launch
from omni_actors.client.offline import as_prompts
from omni_actors.errors import ConfigError
from omni_actors.launcher.one_request import needed_modalities


def overrides(*arguments: str) -> dict[str, str]:
    return launch.overrides(launch.parser().parse_args(["c.yaml", *arguments]))


def test_options_become_overrides() -> None:
    assert overrides() == {}
    given = "--model m --run-dir /r --listen ipc --startup-timeout 5 --set stages.talker.replicas=2 --set name=a=b"
    assert overrides(*given.split()) == {
        "stages.talker.replicas": "2",
        "name": "a=b",
        "model": '"m"',
        "coordinator.run_dir": '"/r"',
        "coordinator.listen": '"ipc"',
        "coordinator.startup_timeout": "5",
    }
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        overrides("--set", "novalue")


def test_text_alone_needs_no_talker() -> None:
    def needed(*arguments: str) -> list[str] | None:
        return needed_modalities(launch.parser().parse_args(["c.yaml", *arguments]))

    assert needed("--prompt", "x") == ["text"]
    assert needed("--prompt", "x", "--save-audio", "a.wav") is None
    assert needed("--prompt", "x", "--save-image", "a.png") == ["image"]


def test_one_prompt_or_many() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert as_prompts("hi") == ["hi"]
    assert as_prompts(["a", "b"]) == ["a", "b"]
    assert as_prompts(chat) == [chat]
    assert as_prompts([chat, chat]) == [chat, chat]
    assert as_prompts({"prompt_token_ids": [1]}) == [{"prompt_token_ids": [1]}]
    assert as_prompts([{"prompt_token_ids": [1]}]) == [{"prompt_token_ids": [1]}]
    assert as_prompts([]) == []
