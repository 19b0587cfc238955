"""Arguments of the other commands that cannot work: refused at once, without a traceback and without waiting."""

from __future__ import annotations

import pytest

from omni_actors.cli.main import main
from omni_actors.host.processes import EXIT_FAILED, EXIT_USAGE
from omni_actors.http_server import __main__ as http_server

NONE = "ipc:///tmp/no-coordinator-here"


def run(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (["ctl", "ipc:///tmp/\udcff", "status"], EXIT_FAILED, "is not an endpoint"),
        (["trace", "last", "--endpoint", "tcp://\x1b:1"], EXIT_FAILED, "is not an endpoint"),
        (
            ["ctl", NONE, "--keys", "~no-such-user", "status"],
            EXIT_FAILED,
            "there is no home folder for '~no-such-user'",
        ),
        (["ctl", NONE, "drain", "talker/0", "--wait", "nan"], EXIT_USAGE, "argument --wait: 'nan' is not a finite"),
        (
            ["ctl", NONE, "drain", "talker/0", "--wait", "-1"],
            EXIT_USAGE,
            "argument --wait: '-1' is not a number of sec",
        ),
        (["top", NONE, "--interval", "0"], EXIT_USAGE, "argument --interval: '0' is not a number of seconds above 0"),
        (["top", NONE, "--interval", "inf"], EXIT_USAGE, "argument --interval: 'inf' is not a finite number"),
        (["keys", "~no-such-user/keys"], EXIT_USAGE, "there is no home folder for '~no-such-user/keys'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, problem: str
) -> None:
    assert run(*arguments) == code
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--endpoint", ""], "--endpoint: '' is not of the form"),
        (["--endpoint", "http://127.0.0.1:1"], "--endpoint: 'http://127.0.0.1:1' is not of the form"),
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
