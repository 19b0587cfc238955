"""The `omni-actors` command finds its subcommands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_actors import __version__, launch
from omni_actors.cli.main import SUBCOMMANDS, main
from omni_actors.processes import EXIT_OK, EXIT_USAGE
from tests.support.builders import chain, write

HELP_HAS = {
    "launch": "Start a pipeline of stages",
    "check": "Start a pipeline of stages",
    "ctl": "{status,drain,restart,shutdown}",
    "top": "omni-actors top",
    "trace": "omni-actors trace",
    "replay": "a file that a stage wrote under --record",
    "keys": "--operator NAME",
}


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_subcommand(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == EXIT_OK
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "usage: omni-actors COMMAND ..."
    assert [line.split()[0] for line in shown if line.startswith("  ")] == list(SUBCOMMANDS)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [([], "a command is missing"), (["lunch"], "unknown command 'lunch'"), (["--nonsense"], "unknown command")],
)
def test_a_wrong_command_shows_the_usage_and_exits_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_USAGE
    shown = capsys.readouterr()
    assert problem in shown.err
    assert "usage: omni-actors COMMAND ..." in shown.err
    assert not shown.out


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_each_subcommand_reaches_its_module(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == EXIT_OK
    assert HELP_HAS[command] in capsys.readouterr().out


def test_check_prints_the_configuration_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.logs, "configure", lambda process: None)
    monkeypatch.setattr(launch, "Launcher", None)
    assert main(["check", str(write(tmp_path, chain())), "--set", "stages.talker.replicas=3"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "placement" in shown
    assert "talker: 3 x echo" in shown
    assert "[command line]" in shown


@pytest.mark.parametrize("module", ["omni_actors", "omni_actors.cli.main"])
def test_the_command_is_a_module_too(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "nonsense"], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_USAGE
    assert "unknown command 'nonsense'" in done.stderr


def test_the_launcher_keeps_its_own_module() -> None:
    command = [sys.executable, "-m", "omni_actors.launch", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_OK
    assert done.stdout.strip() == __version__
