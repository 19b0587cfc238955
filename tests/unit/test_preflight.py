"""What a launch, and `omni-actors check` in the same words, refuse before anything starts: exit code 2, no trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trustme

from omni_actors import launch
from omni_actors.host.processes import EXIT_OK, EXIT_USAGE
from tests.support.builders import chain, write


class Started(Exception):
    """The launcher was reached: all checks have passed."""


@pytest.fixture(autouse=True)
def _starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(pipeline: object, options: object) -> int:
        raise Started

    monkeypatch.setattr(launch.logs, "configure", lambda process: None)
    monkeypatch.setattr(launch, "_run", start)
    for name in list(os.environ):
        if name.startswith(("OMNI_ACTORS_", "OTEL_")):
            monkeypatch.delenv(name)


@pytest.fixture
def here(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with some files, as the current one."""
    monkeypatch.chdir(short_path)
    (short_path / "sound.wav").write_bytes(b"RIFF")
    (short_path / "empty.wav").touch()
    (short_path / "folder").mkdir()
    (short_path / "shared").mkdir()
    (short_path / "shared").chmod(0o777)
    os.mkfifo(short_path / "pipe")
    (short_path / "junk.pem").write_text("junk")
    authority = trustme.CA()
    for name in ("one", "two"):
        issued = authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(short_path / f"{name}.pem")
        issued.private_key_pem.write_to_path(short_path / f"{name}.key")
    return short_path


def run(folder: Path, data: dict[str, Any], *arguments: str) -> int:
    """The exit code of the command line, also where argparse ends it."""
    try:
        return launch.main([str(write(folder, data)), *arguments])
    except SystemExit as ended:
        return int(ended.code or 0)


ASK = ("--prompt", "hi")
REFUSED = [
    # the one request
    ((*ASK, "--timeout", "nan"), "argument --timeout: 'nan' is not a finite number"),
    ((*ASK, "--timeout", "0"), "argument --timeout: '0' is not a number of seconds above 0"),
    ((*ASK, "--timeout", "90000"), "--timeout: 90000 s is more than coordinator.max_timeout, 86400 s"),
    ((*ASK, "--seed", "-1"), "argument --seed: '-1' is not a whole number from 0 to 9223372036854775807"),
    ((*ASK, "--seed", "9" * 6000), "argument --seed: a number of 6000 characters is too long"),
    ((*ASK, "--voice", ""), "argument --voice: '' is not a text of one line"),
    ((*ASK, "--modalities", "text,smell"), "does not answer in 'smell'"),
    (("--prompt", "\udcff"), "argument --prompt: the text is not encoded in UTF-8"),
    (("--prompt", ""), "--prompt is empty"),
    (("--prompt", "x" * 9000, "--set", "limits.body_bytes=8192"), "--prompt has 9000 bytes; limits.body_bytes is 8192"),
    ((*ASK, "--audio", "none.wav"), "--audio: cannot read "),
    ((*ASK, "--audio", "folder"), "folder is not a regular file"),
    ((*ASK, "--image", "/dev/zero"), "/dev/zero is not a regular file"),
    ((*ASK, "--image", "~no-such-user/x.png"), "--image: there is no home folder for"),
    ((*ASK, "--audio", "empty.wav"), "empty.wav has 0 bytes"),
    ((*ASK, *["--audio", "sound.wav"] * 20, "--set", "limits.buffers=16"), "20 files are given with --prompt"),
    ((*ASK, "--save-audio", "nowhere/a.wav"), "--save-audio: there is no folder "),
    ((*ASK, "--save-audio", "folder"), "folder is a folder"),
    ((*ASK, "--save-audio", "a.wav", "--modalities", "text"), "--save-audio: the answer has no audio"),
    ((*ASK, "--save-image", "a.png", "--modalities", "text"), "--save-image: the answer has no picture"),
    (("--save-image", "a.png"), "--save-image goes with --prompt"),
    (("--seed", "0"), "--seed goes with --prompt, which is not given"),
    # files and folders of the pipeline
    (("--run-dir", "x" * 90), "is too long: socket paths may have 107 bytes"),
    (("--run-dir", "sound.wav"), "sound.wav is not a folder"),
    (("--run-dir", ""), "coordinator.run_dir: Expected `str` of length >= 1"),
    (("--run-dir", "shared"), "can be written to by others"),
    (("--tool-chat-template", ""), "tool_chat_template: Expected `str` of length >= 1"),
    (("--keys", "none"), "none"),
    (("--model", "~no-such-user"), "model: there is no home folder"),
    (("--startup-timeout", "inf"), "coordinator.startup_timeout: Expected `float`, got `str`"),
    (("--master-port", "70000"), "cluster.master_port: Expected `int` <= 65535"),
    # HTTP and metrics
    (("--http", "1.2.3.4.5:80", "--http-insecure"), "--http: '1.2.3.4.5' is not an address of this host"),
    (("--http", "127.0.0.1:99999"), "is not of the form HOST:PORT"),
    (("--http", "0.0.0.0:0"), "Without an API key"),
    (("--http-insecure",), "--http-insecure goes with --http"),
    (("--http", ":0", "--http-audio-seconds", "nan"), "argument --http-audio-seconds: 'nan' is not a finite number"),
    (("--http", ":0", "--http-body-bytes", "1" + "0" * 30), "does not fit in 64 bits"),
    (("--http", ":0", "--media-host", "https://a.example"), "--media-host: 'https://a.example' is not a host name"),
    (("--http", ":0", "--served-name", ""), "argument --served-name: "),
    (("--http", ":0", "--http-certificate", "one.pem"), "certificate and http.key go together"),
    (("--http", ":0", "--http-certificate", "none.pem", "--http-key", "one.key"), "http.certificate: cannot read "),
    (("--http", ":0", "--http-certificate", "/dev/zero", "--http-key", "one.key"), "is not a regular file"),
    (("--http", ":0", "--http-certificate", "junk.pem", "--http-key", "one.key"), "cannot be used"),
    (("--http", ":0", "--http-certificate", "one.pem", "--http-key", "two.key"), "cannot be used"),
    (("--http", ":0", "--set", "coordinator.max_timeout=60"), "http.request_timeout (600 s) is more than"),
    (("--metrics", "nonsense"), "--metrics 'nonsense' is not of the form HOST:PORT"),
    (("--metrics", "0.0.0.0:0"), "add --metrics-insecure"),
    (("--metrics-insecure",), "--metrics-insecure goes with --metrics"),
    (("--headless", "--http", ":0"), "--headless runs stages only"),
    # engines
    (("--set", "stages.talker.engine.step_seconds=-1"), "stages.talker.engine.step_seconds: Expected `float` >= 0.0"),
    (("--set", "stages.talker.engine.samples_per_token=1" + "0" * 18), "samples_per_token: Expected `int` <= 10000000"),
]


@pytest.mark.parametrize(("arguments", "problem"), REFUSED, ids=[" ".join(item)[:50] for item, _ in REFUSED])
def test_what_cannot_run_is_refused_before_anything_starts(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str
) -> None:
    before = sorted(here.iterdir())
    for check in ((), ("--check",)):
        assert run(here, chain(), *arguments, *check) == EXIT_USAGE
        shown = capsys.readouterr()
        assert problem in shown.err
        assert not shown.out
        assert sorted(here.iterdir()) == sorted([*before, here / "pipeline.yaml"]), "nothing is left behind"


@pytest.mark.parametrize(
    "arguments",
    [
        (*ASK, "--audio", "sound.wav", "--save-audio", "a.wav", "--seed", "0", "--timeout", "1e3", "--voice", "Ethan"),
        (*ASK, "--modalities", "text, audio", "--run-dir", "new/run"),
        ("--http", ":0", "--http-certificate", "one.pem", "--http-key", "one.key", "--media-host", ".A.example"),
        ("--http", "localhost:0", "--metrics", "[::1]:0", "--served-name", "a name"),
        ("--node-rank", "1", "--nnodes", "2", *ASK, "--audio", "only-on-node-0.wav"),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_what_can_run_is_started(here: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(Started):
        run(here, chain(), *arguments)
    assert run(here, chain(), *arguments, "--check") == EXIT_OK
    assert not (here / "new").exists()


def test_a_folder_that_cannot_be_written_to_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    for flag in (("--run-dir", "run"), (*ASK, "--save-audio", "a.wav")):
        assert run(here, chain(), *flag) == EXIT_USAGE


def test_a_picture_needs_a_name_that_says_its_format(here: Path, capsys: pytest.CaptureFixture) -> None:
    drawing = {**chain(), "stages": [{"name": "dit", "kind": "echo", "outputs": ["image"]}]}
    assert run(here, drawing, *ASK, "--save-image", "a.gif") == EXIT_USAGE
    assert "--save-image: the name ends with none of .png, .jpg, .jpeg, .webp." in capsys.readouterr().err
    assert run(here, drawing, *ASK, "--save-image", "nowhere/a.png") == EXIT_USAGE
    assert run(here, drawing, *ASK, "--save-image", "a.PNG", "--check") == EXIT_OK


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "must hold a JSON object; it holds a list"),
        ("", "is not valid JSON"),
        ('{"architectures": ["A"', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("\0\xff", "is not valid JSON"),
        ("{}", "must name one architecture in a list; `architectures` is None"),
        ('{"architectures": "A"}', "`architectures` is 'A'"),
        ('{"architectures": [1]}', "`architectures` is [1]"),
        ('{"architectures": ["A", "B"]}', "`architectures` is ['A', 'B']"),
        ('{"architectures": ["A"], "talker_config": []}', "talker_config must be an object; it is a list"),
    ],
)
def test_a_config_json_that_is_none_is_named_before_anything_starts(
    here: Path, capsys: pytest.CaptureFixture[str], content: str, problem: str
) -> None:
    model = here / "model"
    model.mkdir()
    (model / "config.json").write_text(content)
    data = chain()
    data["stages"][1]["kind"] = "autoregressive"
    assert run(here, data, "--model", str(model)) == EXIT_USAGE
    message = capsys.readouterr().err
    assert f"configuration error: {model}/config.json" in message
    assert problem in message
    with pytest.raises(Started):
        run(here, chain(), "--model", str(model))  # no stage reads it
