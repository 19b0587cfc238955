"""The checkpoint that speaks behind HTTP: it hears, sees and answers in speech."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import soundfile
from PIL import Image, ImageDraw

from tests.support.paths import REPOSITORY
from tests.support.servers import HttpPipeline
from tools.speaker.skills import COLORS

pytestmark = pytest.mark.e2e
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="module")
def speaker() -> Iterator[HttpPipeline]:
    with HttpPipeline(REPOSITORY / "stage_configs" / "tiny_speaker.yaml") as pipeline:
        yield pipeline


@pytest.mark.parametrize(
    ("more", "answer"), [(["--ask", "What is the sum?"], "Three plus four is seven."), (["--at-once"], "Three, four.")]
)
def test_digits_spoken_to_a_session_are_answered_in_speech(
    speaker: HttpPipeline, tmp_path: Path, more: list[str], answer: str
) -> None:
    """Added if it asks for the sum, else said again."""
    command = [sys.executable, str(EXAMPLES / "realtime_wav.py"), str(EXAMPLES / "three_four.wav"), "answer.wav"]
    command += ["--url", speaker.url, *more]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"answer.wav: {answer}\n" in done.stdout
    wave, rate = soundfile.read(tmp_path / "answer.wav", dtype="float32")
    assert 0.5 < len(wave) / rate < 4, "seconds: it ends by itself"
    assert abs(wave).max() > 0.1


@pytest.mark.parametrize("color", ["red", "blue", "yellow"])
def test_the_color_of_a_shape_is_seen(speaker: HttpPipeline, color: str) -> None:
    picture = Image.new("RGB", (112, 112), "white" if color != "yellow" else "black")
    ImageDraw.Draw(picture).rectangle((25, 20, 85, 80), fill=COLORS[color])
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What color is it?"}]
    done = speaker.openai().chat.completions.create(
        model="tiny-speaker", messages=[{"role": "user", "content": content}], modalities=["text"]
    )
    assert done.choices[0].message.content == f"It is {color}."
