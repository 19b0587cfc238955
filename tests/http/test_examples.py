"""Examples run as they stand; those with their own models are in tests/process and tests/e2e."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import soundfile
from PIL import Image

from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline, sound

EXAMPLES = REPOSITORY / "examples"
ELSEWHERE = {"openai_speech.py", "one_stage.py", "three_four.wav"}  # tests/http/test_spoken_texts.py and tests/e2e
CLIENT_PAGE = (REPOSITORY / "docs" / "client.md").read_text()


class Run(NamedTuple):
    """A command, in which URL and ENDPOINT are those of a pipeline and EXAMPLES is the folder of the examples.

    Args:
        said: patterns of what it prints.
        files: those that it writes: tokens of a sound, each of which an echo stage makes 480 samples of, or the size
            of a picture.
    """

    pipeline: str
    command: str
    said: tuple[str, ...] = ()
    files: Mapping[str, int | tuple[int, int]] | None = None


RUNS = [
    Run(
        "echo",
        "client_sync.py ENDPOINT --prompt tide --voice Ethan --audio EXAMPLES/question.wav --image EXAMPLES/sea.png",
        ("voices: Chelsie, Ethan\ntide\n0.08 s of audio in answer.wav\n", "code2wav: 4 out"),
        {"answer.wav": 4},
    ),
    Run(
        "slow",
        f"client_async.py ENDPOINT sea {'w' * 900} --abort-after 3",
        (r"\[0\] 'sea', 0.06 s of audio, the first after", r"\[1\] aborted after 'www"),
    ),
    Run(
        "echo",
        "realtime_wav.py question.wav answer.wav --url URL/v1 --voice Ethan --instructions tide --at-once",
        ("0.08 s in answer.wav: tide",),
        {"answer.wav": 4},
    ),
    Run("echo", "curl.sh URL/v1", ('{"status":"ok"}\n-- a whole answer\n', r"data: \[DONE\]"), {"speech.wav": 24}),
    Run(
        "echo",
        "openai_chat.py --url URL/v1 --max-tokens=12 --image EXAMPLES/sea.png",
        tuple(rf"{part}: +\S" for part in ("whole", "streamed", "picture")),
    ),
    Run(
        "echo",
        "openai_audio.py --url URL/v1 --max-tokens=12 --question EXAMPLES/question.wav",
        files={"answer.wav": 12, "answer_spoken.wav": 12},
    ),
    Run(
        "pictures",
        "openai_images.py --url URL --size 128x64",
        ("step 8 of 8\npicture.png: 128x64, 32 tokens", "edited.png: 128x64\n"),
        files=dict.fromkeys(("edited.png", "picture.png", "preview0.png", "preview1.png"), (128, 64)),
    ),
    Run(
        "pictures",
        "client_images.py ENDPOINT a b --steps 3",
        ("0: step 3 of 3\n", "1: 1.png, 64 x 64 pixels\n"),
        files=dict.fromkeys(("0.png", "1.png"), (64, 64)),
    ),
    Run(
        "pictures",
        "curl_images.sh URL/v1",
        ('("step":.*){4}',),
        files=dict.fromkeys(("daylight.jpg", "lighthouse.png"), (64, 64)),
    ),
]


def run(folder: Path, *command: object, code: int = 0) -> str:
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("example", RUNS, ids=lambda example: example.command.partition(" ")[0])
def test_an_example_runs(request: pytest.FixtureRequest, tmp_path: Path, example: Run) -> None:
    pipeline: HttpPipeline = request.getfixturevalue(example.pipeline)
    (tmp_path / "question.wav").write_bytes(sound())
    name, *arguments = example.command.split()
    places = {"ENDPOINT": pipeline.endpoint, "URL": pipeline.url, "EXAMPLES": str(EXAMPLES)}
    given = [re.sub(r"\b(ENDPOINT|URL|EXAMPLES)\b", lambda found: places[found[1]], each) for each in arguments]
    text = run(tmp_path, *([sys.executable] if name.endswith(".py") else []), EXAMPLES / name, *given)
    for pattern in example.said:
        assert re.search(pattern, text, re.S), text
    for file, size in (example.files or {}).items():
        if isinstance(size, int):
            samples, rate = soundfile.read(tmp_path / file)
            assert (len(samples), rate) == (480 * size, 24_000)
        else:
            with Image.open(tmp_path / file) as picture:
                assert picture.size == size


def test_a_batch_continues_where_it_stopped(echo: HttpPipeline, tmp_path: Path) -> None:
    prompts = [{"id": f"p{number}", "prompt": f"number {number}", "voice": "Ethan"} for number in range(5)]
    prompts.append({"id": "wrong", "prompt": "x", "voice": "Nobody"})
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    command = [sys.executable, EXAMPLES / "batch.py", echo.endpoint, "prompts.jsonl", "answers.jsonl"]
    command += ["--audio-folder", "sounds"]
    assert "5 answered, 1 failed, 0 were there" in run(tmp_path, *command, code=1)
    answers = {line["id"]: line for line in map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())}
    assert answers["p3"]["text"] == "number 3"
    assert len(soundfile.read(tmp_path / answers["p3"]["audio"])[0]) == 480 * len("number 3")
    assert answers["wrong"]["error"] == "unknown_voice"
    again = run(tmp_path, *command, code=1)
    assert "0 answered, 1 failed, 5 were there" in again, "only what failed is asked again"


@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        ("echo", "asyncio.run", r"^Why is the sea salt\?.*20\n$"),
        ("pictures", "Progress", r"^width int 8.0 4096.0 64\n.*step 4 of 4\n.*\(64, 128, 3\) picture\n$"),
    ],
)
def test_the_documented_client_runs(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, part: str, said: str
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", CLIENT_PAGE, re.M | re.S)
    (block,) = [block for block in blocks if part in block]
    endpoint = request.getfixturevalue(name).endpoint
    text = run(tmp_path, sys.executable, "-c", block.replace("ipc:///tmp/omni-x/client", endpoint))
    assert re.search(said, text, re.S), text


def test_every_example_has_a_test() -> None:
    names = {path.name for path in EXAMPLES.glob("*.*")}
    assert not [name for name in names - ELSEWHERE if name not in Path(__file__).read_text()]
