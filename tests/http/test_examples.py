"""Examples run as they stand; those with their own models are in tests/process and tests/e2e."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from PIL import Image

from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline, sound

EXAMPLES = REPOSITORY / "examples"
ELSEWHERE = {"openai_speech.py", "one_stage.py", "three_four.wav"}  # tests/http/test_spoken_texts.py and tests/e2e


def run(folder: Path, *command: object, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_the_sync_client_answers_and_saves_audio(echo: HttpPipeline, tmp_path: Path) -> None:
    media = ["--audio", EXAMPLES / "question.wav", "--image", EXAMPLES / "sea.png"]
    asked = ["--prompt", "the tide is full", "--voice", "Ethan"]
    text = run(tmp_path, sys.executable, EXAMPLES / "client_sync.py", echo.endpoint, *asked, *media)
    assert "voices: Chelsie, Ethan\nthe tide is full\n0.32 s of audio in answer.wav\n" in text
    assert "code2wav: 16 out" in text
    assert len(soundfile.read(tmp_path / "answer.wav")[0]) == 16 * 480


def test_the_async_client_answers_and_aborts(slow: HttpPipeline, tmp_path: Path) -> None:
    text = run(
        tmp_path, sys.executable, EXAMPLES / "client_async.py", slow.endpoint, "sea", "w" * 900, "--abort-after", "3"
    )
    assert "[0] 'sea', 0.06 s of audio, the first after" in text
    assert "[1] aborted after 'www" in text


def test_a_batch_continues_where_it_stopped(echo: HttpPipeline, tmp_path: Path) -> None:
    prompts = [{"id": f"p{number}", "prompt": f"number {number}", "voice": "Ethan"} for number in range(20)]
    prompts.append({"id": "wrong", "prompt": "x", "voice": "Nobody"})
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    command = [sys.executable, EXAMPLES / "batch.py", echo.endpoint]
    command += ["prompts.jsonl", "answers.jsonl", "--audio-folder", "sounds"]
    assert "20 answered, 1 failed, 0 were there" in run(tmp_path, *command, code=1)
    answers = {line["id"]: line for line in map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())}
    assert len(answers) == 21
    for number in range(20):
        line = answers[f"p{number}"]
        assert line["text"] == f"number {number}"
        samples, rate = soundfile.read(tmp_path / line["audio"])
        assert len(samples) == 480 * len(line["text"])
        assert rate == 24_000
        assert line["seconds"] == 0.02 * len(line["text"])
    assert answers["wrong"]["error"] == "unknown_voice"
    again = run(tmp_path, *command, code=1)
    assert "0 answered, 1 failed, 20 were there" in again, "only what failed is asked again"


def test_the_documented_client_runs(echo: HttpPipeline, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "client.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if "asyncio.run" in block]
    assert "ipc:///tmp/omni-x/client" in block
    text = run(tmp_path, sys.executable, "-c", block.replace("ipc:///tmp/omni-x/client", echo.endpoint))
    assert text.split("?")[0] == "Why is the sea salt"
    assert text.endswith(f"{len('Why is the sea salt?')}\n"), "tokens of the usage"


def test_the_documented_client_draws(pictures: HttpPipeline, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "client.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if "Progress" in block]
    text = run(tmp_path, sys.executable, "-c", block.replace("ipc:///tmp/omni-x/client", pictures.endpoint))
    assert text.startswith("width int 8.0 4096.0 64\n")
    assert "step 4 of 4\n" in text
    assert text.endswith("(64, 128, 3) picture\n")
    assert text.count("preview\n") == 1


def test_a_file_is_spoken_to_a_session(echo: HttpPipeline, tmp_path: Path) -> None:
    (tmp_path / "question.wav").write_bytes(sound())
    example = EXAMPLES / "realtime_wav.py"
    more = ["--url", f"{echo.url}/v1", "--voice", "Ethan", "--instructions", "the tide", "--at-once"]
    text = run(tmp_path, sys.executable, example, "question.wav", "answer.wav", *more)
    assert "0.16 s in answer.wav: the tide" in text
    assert len(soundfile.read(tmp_path / "answer.wav")[0]) == 8 * 480


def test_curl_gets_every_answer(echo: HttpPipeline, tmp_path: Path) -> None:
    text = run(tmp_path, EXAMPLES / "curl.sh", f"{echo.url}/v1")
    assert text.startswith('{"status":"ok"}\n-- a whole answer\n')
    assert text.count('chat.completion"') == 2
    assert "data: [DONE]" in text
    assert len(soundfile.read(tmp_path / "speech.wav")[0]) == 24 * 480


def test_openai_chats_about_a_picture(echo: HttpPipeline, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "openai_chat.py", "--url", f"{echo.url}/v1", "--max-tokens=12"]
    text = run(tmp_path, *command, "--image", EXAMPLES / "sea.png")
    assert all(re.search(rf"{part}: +\S", text) for part in ("whole", "streamed", "picture"))


def test_openai_speaks_and_is_spoken_to(echo: HttpPipeline, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "openai_audio.py", "--url", f"{echo.url}/v1", "--max-tokens=12"]
    run(tmp_path, *command, "--question", EXAMPLES / "question.wav")
    for name in ("answer.wav", "answer_spoken.wav"):
        samples, rate = soundfile.read(tmp_path / name)
        assert rate == 24_000
        assert len(samples) == 12 * 480


def pictures_in(folder: Path) -> dict[str, tuple[int, int]]:
    """The sizes of the pictures in a folder, by name."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        with Image.open(path) as picture:
            sizes[path.name] = picture.size
    return sizes


def test_openai_makes_and_edits_a_picture(pictures: HttpPipeline, tmp_path: Path) -> None:
    text = run(tmp_path, sys.executable, EXAMPLES / "openai_images.py", "--url", pictures.url, "--size", "128x64")
    assert "step 8 of 8\npicture.png: 128x64, 32 tokens" in text
    assert "edited.png: 128x64\n" in text
    names = ("edited.png", "picture.png", "preview0.png", "preview1.png")
    assert pictures_in(tmp_path) == dict.fromkeys(names, (128, 64))


def test_the_client_makes_several_pictures_at_once(pictures: HttpPipeline, tmp_path: Path) -> None:
    text = run(tmp_path, sys.executable, EXAMPLES / "client_images.py", pictures.endpoint, "a", "b", "--steps", "3")
    assert "0: step 3 of 3\n" in text
    assert "1: 1.png, 64 x 64 pixels\n" in text
    assert pictures_in(tmp_path) == dict.fromkeys(("0.png", "1.png"), (64, 64))
    assert (tmp_path / "0.png").read_bytes() != (tmp_path / "1.png").read_bytes()


def test_curl_makes_and_edits_a_picture(pictures: HttpPipeline, tmp_path: Path) -> None:
    text = run(tmp_path, EXAMPLES / "curl_images.sh", f"{pictures.url}/v1")
    assert text.count('"step":') == 4
    assert pictures_in(tmp_path) == dict.fromkeys(("daylight.jpg", "lighthouse.png"), (64, 64))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.*")), ids=lambda path: path.name)
def test_every_example_has_a_test(path: Path) -> None:
    assert path.name in ELSEWHERE or f'"{path.name}"' in Path(__file__).read_text()
