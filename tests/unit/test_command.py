"""The `omni-actors` command finds its subcommands, and what the arguments of a launch mean."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from omni_actors import launch
from omni_actors.cli.completion import script
from omni_actors.cli.main import SUBCOMMANDS, main
from omni_actors.client.offline import as_prompts
from omni_actors.host.processes import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from omni_actors.http_server import __main__ as http_server
from omni_actors.launcher.one_request import needed_modalities
from tests.support.commands import python

NONE = "ipc:///tmp/no-coordinator-here"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "a command is missing"),
        (["lunch"], "unknown command 'lunch'; did you mean launch?"),
        (["--nonsense"], "unknown command"),
    ],
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
def test_each_subcommand_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == EXIT_OK
    assert "usage: omni-actors" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["omni_actors", "omni_actors.cli.main"])
def test_the_command_is_a_module_too(module: str) -> None:
    done = python("-m", module, "nonsense")
    assert done.returncode == EXIT_USAGE
    assert "unknown command 'nonsense'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "echo", "--htpp", ":0"], "unrecognized arguments: --htpp :0; did you mean --http?"),
        (["ctl", "statis"], "invalid choice: 'statis' (choose from 'status', 'drain', 'restart', 'scale', 'shutdown')"),
        (["trace"], "the following arguments are required: request"),
        (["chat", "--voic", "x", "--sistem", "y"], "did you mean --system?"),
    ],
)
def test_a_mistake_is_answered_with_a_short_usage_and_the_nearest_flag(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == EXIT_USAGE
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.startswith(f"usage: omni-actors {arguments[0]}")
    assert shown.endswith(f"omni-actors {arguments[0]} --help lists everything\n")
    assert len(shown.splitlines()) <= 4


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["tr"], "trace"),
        (["launch", "qwen2_5_omni_3"], "qwen2_5_omni_3b_24gb"),
        (["launch", "echo", "--star"], "--startup-timeout"),
        (["ctl", "dr"], "drain"),
    ],
)
def test_a_shell_completes_commands_flags_and_names(
    completion: Path, tmp_path: Path, typed: list[str], offered: str
) -> None:
    words = " ".join(["omni-actors", *typed])
    ask = f"source {completion}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _omni_actors; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout.split() == [offered]


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "omni-actors"
    path.write_text(script())
    return path


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["ctl", "ipc:///tmp/\udcff", "status"], EXIT_FAILED, "is not an endpoint"),
        (["trace", "last", "--endpoint", "tcp://\x1b:1"], EXIT_FAILED, "is not an endpoint"),
        (["ctl", NONE, "--keys", "~no-such-user", "status"], EXIT_FAILED, "no home folder for '~no-such-user'"),
        (["ctl", NONE, "drain", "talker/0", "--wait", "-1"], EXIT_USAGE, "argument --wait: '-1' is not a number of"),
        (["top", NONE, "--interval", "inf"], EXIT_USAGE, "argument --interval: 'inf' is not a finite number"),
        (["check", "echo", "--set", "novalue"], EXIT_USAGE, "KEY=VALUE"),
        (["keys", "~no-such-user/keys"], EXIT_USAGE, "there is no home folder for '~no-such-user/keys'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, problem: str
) -> None:
    try:
        ended: object = main(arguments)
    except SystemExit as error:
        ended = error.code
    assert ended == code
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--endpoint", "tcp://127.0.0.1:99999"], "is not of the form ipc://PATH or tcp://HOST:PORT"),
        (["--endpoint", NONE, "--keys", "/nowhere"], "Cannot use the keys in /nowhere: No such file"),
        (["--endpoint", NONE, "--http-bodies-bytes", "2000"], "http.bodies_bytes (2000) is less than body_bytes"),
        (["--endpoint", NONE, "--http-read-timeout", "0"], "http.read_timeout: Expected `float` > 0.0"),
    ],
)
def test_the_http_server_refuses_what_it_could_not_serve_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    monkeypatch.setattr(http_server.logs, "configure", lambda process: None)
    monkeypatch.setattr(http_server.setproctitle, "setproctitle", lambda title: None)
    assert http_server.main([*arguments, "--http", "127.0.0.1:0"]) == EXIT_USAGE
    assert problem in capsys.readouterr().err


def test_text_alone_needs_no_talker() -> None:
    def needed(*arguments: str) -> list[str] | None:
        return needed_modalities(launch.parser().parse_args(["c.yaml", *arguments]))

    assert needed("--prompt", "x") == ["text"]
    assert needed("--prompt", "x", "--save-audio", "a.wav") is None
    assert needed("--prompt", "x", "--save-image", "a.png") == ["image"]


def test_a_chat_is_one_prompt_and_a_list_of_chats_several() -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert as_prompts(chat) == [chat]
    assert as_prompts([chat, chat]) == [chat, chat]
    assert as_prompts([{"prompt_token_ids": [1]}]) == [{"prompt_token_ids": [1]}]
