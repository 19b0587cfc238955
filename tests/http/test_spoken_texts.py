"""Pipelines that speak the text they are given: /v1/audio/speech, and voices that clients make of recordings.

The echo stages speak what they are told as `name=value`, and then the text, a sample for each character.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import httpx
import numpy
import psutil
import pytest
import soundfile
from playwright.sync_api import expect

from omni_actors.cli import say as command
from omni_actors.client import OmniClient, spoken
from omni_actors.client.prompts import read_aloud
from omni_actors.errors import InvalidRequest, MalformedMedia
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.speech import texts
from tests.support.browser import ask, chromium, data, needs_chromium, open_page, watched_page
from tests.support.http_servers import http_server
from tests.support.paths import REPOSITORY
from tests.support.processes import processes_of
from tests.support.servers import HttpPipeline, serving, sound, tone, wait_healthy
from tests.support.spoken import said
from tests.support.waiting import until

TEXT = "The tide is full."
RECORDING = sound(2.0)
QUIET = io.BytesIO()
soundfile.write(QUIET, 0.001 * tone(2.0), 16_000, format="WAV")
WRONG_NAMES = ("a/b", "Default", "Alloy", "voice_0123")
TOLD = "clip=48000@0.30 clip_rate=24000 "  # of RECORDING, at the pipeline's rate


def voices(url: str) -> dict:
    return httpx.get(f"{url}/v1/audio/voices").json()


def create(url: str, recording: bytes = RECORDING, **fields: object) -> httpx.Response:
    files = {"audio_sample": ("a", recording)}
    return httpx.post(f"{url}/v1/audio/voices", files=files, data={"name": "Mara", **fields}, timeout=30)


def speak(pipeline: HttpPipeline, **fields: object) -> str:
    known = {name: fields.pop(name) for name in ("voice", "instructions") if name in fields}
    options = {"model": pipeline.openai().models.list().data[0].id, "input": TEXT, "response_format": "pcm", **known}
    options.setdefault("voice", "default")
    return said(pipeline.openai().audio.speech.create(**options, extra_body=fields).content)


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


def test_the_text_that_is_given_is_spoken(preset: HttpPipeline) -> None:
    assert speak(preset) == TEXT
    assert speak(preset, voice="ryan", language="german") == f"language=German voice=ryan {TEXT}"
    assert speak(preset, voice="Ryan", language="Auto") == f"language=auto voice=ryan {TEXT}"
    wav = preset.openai().audio.speech.create(model="echo-speech", input=TEXT, voice="vivian", response_format="wav")
    samples, rate = soundfile.read(io.BytesIO(wav.content), dtype="int16")
    assert rate == 24_000
    assert said(samples.astype("<i2").tobytes()) == f"voice=vivian {TEXT}"


def long_text(characters: int) -> str:
    """Sentences of different lengths, the last one without its end."""
    words = (f"Wave {number} comes{' slowly' * (number % 7)}. " for number in itertools.count())
    text = ""
    while len(text) < characters:
        text += next(words)
    return text[:characters]


def events_of(url: str, **body: object) -> list[dict]:
    body = {"response_format": "pcm", "stream_format": "sse", **body}
    lines = httpx.post(f"{url}/v1/audio/speech", json=body).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def heard_in(events: list[dict]) -> str:
    return said(b"".join(base64.b64decode(event["audio"]) for event in events[:-1]))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are long from 500 characters on; the usual 4096 take echo stages seconds."""
    monkeypatch.setattr(texts, "IN_ONE_GO", 500)


def test_a_long_text_is_spoken_in_pieces_that_follow_one_another(brief: None, preset: HttpPipeline) -> None:
    """Each with the voice, and with whole sentences; echo stages say the voice before each piece."""
    text = long_text(1500)
    with serving(create_app(ServerSettings(endpoint=preset.endpoint))) as url:
        events = events_of(url, input=text, voice="ryan")
    heard = heard_in(events)
    pieces = heard.split("voice=ryan ")[1:]
    assert " ".join(pieces) == text.strip()
    assert 3 < len(pieces) < 6
    assert all(len(piece) <= 400 and piece.endswith(".") for piece in pieces[:-1])
    assert events[-1]["transcript"] == text
    assert events[-1]["usage"]["output_tokens"] == len(heard)


def test_a_model_that_answers_reads_a_long_text_piece_by_piece(brief: None, echo: HttpPipeline) -> None:
    body = {"input": TEXT, "voice": "Ethan", "language": "German"}
    assert refusal(httpx.post(f"{echo.url}/v1/audio/speech", json=body)) == (400, "language", "unsupported_parameter")
    text = long_text(900)
    with serving(create_app(ServerSettings(endpoint=echo.endpoint))) as url:
        done = events_of(url, input=text)[-1]
    asked = re.findall(r"<<<\n(.*?)\n>>>", done["transcript"], re.S)  # echo stages repeat all that they are asked
    assert len(asked) > 2
    assert " ".join(asked) == text.strip()
    assert done["usage"]["input_tokens"] == len(done["transcript"]) - (len(asked) - 1)


def test_a_client_that_leaves_stops_a_long_text(preset: HttpPipeline, slow_speech: HttpPipeline) -> None:
    body = {"input": long_text(100_000), "response_format": "pcm"}
    for pipeline in (preset, slow_speech):  # `slow_speech` would speak it for minutes
        with httpx.stream("POST", f"{pipeline.url}/v1/audio/speech", json=body) as response:
            assert len(next(response.iter_raw())) > 0
        pipeline.assert_idle()


@pytest.mark.nightly
def test_more_than_an_hour_of_speech_is_streamed_to_its_end_and_memory_stays_flat() -> None:
    """Fifteen characters a second, as people speak; the sound is looked at while it comes, and not kept."""
    text, per_character, rate = long_text(100_000), 1600, 24_000
    overrides = {"stages.talker.engine.speech": "{}", "stages.code2wav.engine.samples_per_token": per_character}
    spoken, memory = [], []
    with HttpPipeline(REPOSITORY / "stage_configs" / "echo_speech.yaml", overrides) as pipeline:
        processes = [psutil.Process(pid) for pid in processes_of(pipeline.run_dir)]
        body = {"input": text, "response_format": "pcm"}
        with httpx.stream("POST", f"{pipeline.url}/v1/audio/speech", json=body, timeout=60) as response:
            for data in response.iter_bytes(2 * per_character * 1000):  # 1000 characters
                spoken.append(said(numpy.frombuffer(data, "<i2")[::per_character].tobytes()))
                memory.append(sum(process.memory_full_info().uss for process in processes))
        pipeline.assert_idle()
    assert "".join(spoken).replace(" ", "") == text.replace(" ", "")
    seconds = sum(map(len, spoken)) * per_character / rate
    assert seconds > 3600
    quarter = len(memory) // 4
    grown = statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter])
    assert grown < 48 << 20, [size >> 20 for size in memory]  # all of the sound is 450 MiB


def test_a_failure_in_a_long_text_ends_its_stream(slow_speech: HttpPipeline) -> None:
    """Here its time is over, which holds for all of it; it is longer where the first sound takes that long."""
    for seconds in (2.0, 8.0, 32.0):
        events = events_of(slow_speech.url, input=long_text(40_000), timeout=seconds)
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        if len(events) > 1:
            break
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}


def test_what_a_model_with_voices_of_its_own_does_not_take(preset: HttpPipeline) -> None:
    words = {"timestamp_granularities": ["word"]}
    for fields, param, code in (
        ({"input": " \n"}, "input", "invalid_value"),
        ({"input": "a" * 4097, "response_format": "flac"}, "response_format", "unsupported_value"),
        ({"voice": "alice"}, "voice", "unknown_voice"),
        ({"language": "Klingon"}, "language", "invalid_value"),
        ({"instructions": "Slowly."}, "instructions", "unsupported_parameter"),
        (words, "timestamp_granularities", "unsupported_value"),
        ({**words, "stream_format": "sse"}, "timestamp_granularities", "unsupported_value"),
    ):
        answer = httpx.post(f"{preset.url}/v1/audio/speech", json={"input": TEXT, **fields})
        assert refusal(answer) == (400, param, code)
    asked = {"chat/completions": {"messages": [{"role": "user", "content": TEXT}]}, "completions": {"prompt": TEXT}}
    for route, body in {**asked, "responses": {"input": TEXT}, "images/generations": {"prompt": TEXT}}.items():
        answer = httpx.post(f"{preset.url}/v1/{route}", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_modality"), "it answers nothing"
    assert refusal(create(preset.url)) == (400, "audio_sample", "unsupported_parameter")
    assert voices(preset.url) == {"voices": ["vivian", "ryan"], "aliases": {}, "created": []}


def test_a_voice_is_made_of_a_recording_used_and_deleted(cloning: HttpPipeline) -> None:
    """By name in any case, by id and by alias; with the recording, at the pipeline's rate, and what is said in it."""
    url = cloning.url
    assert voices(url) == {"voices": [], "aliases": {"alloy": "Mara"}, "created": []}
    client = cloning.openai()
    options = {"consent": "cons_1", "model": "auto", "type": "audio_sample"}
    voice = client.audio.voices.create(
        name="Mara", audio_sample=("a.wav", RECORDING), extra_body={"transcript": "One, two."}, **options
    )
    made = voice.to_dict()
    assert made.items() >= {"object": "audio.voice", "name": "Mara", "seconds": 2.0, "transcript": "One, two."}.items()
    assert voices(url) == {"voices": ["Mara"], "aliases": {"alloy": "Mara"}, "created": [made]}
    assert httpx.get(f"{url}/v1/status").json()["voices"] == ["Mara"]
    assert httpx.get(f"{url}/v1/audio/voices/{made['id']}").json() == made
    told = f"{TOLD}transcript=One, two. "
    for name in ("Mara", "mara", {"id": voice.id}, "alloy"):
        assert speak(cloning, voice=name) == f"{told}{TEXT}"
    wanted = f"{TOLD}instructions=Slowly. language=English transcript=One, two. {TEXT}"
    assert speak(cloning, voice="Mara", instructions="Slowly.", language="English") == wanted
    assert refusal(create(url, name="MARA")) == (400, "name", "invalid_value")
    deleted = httpx.delete(f"{url}/v1/audio/voices/mara").json()
    assert deleted == {"id": made["id"], "object": "audio.voice", "name": "Mara", "deleted": True}
    assert refusal(httpx.delete(f"{url}/v1/audio/voices/mara")) == (404, "voice", "voice_not_found")
    answer = httpx.post(f"{url}/v1/audio/speech", json={"input": TEXT, "voice": "Mara"})
    assert refusal(answer) == (400, "voice", "unknown_voice")
    answer = httpx.post(f"{url}/v1/audio/speech", json={"input": TEXT})
    assert refusal(answer) == (400, "voice", "missing_required_parameter")


def test_recordings_and_names_that_are_refused_and_how_many_there_may_be(cloning: HttpPipeline) -> None:
    for recording, fields, wanted in (
        (b"", {}, (400, "audio_sample", "invalid_value")),
        (b"no sound at all", {}, (400, "audio_sample", "malformed_media")),
        (sound(30.5, 8000), {}, (413, "audio_sample", "media_too_large")),
        (sound(0.4), {}, (400, "audio_sample", "invalid_value")),
        (QUIET.getvalue(), {}, (400, "audio_sample", "invalid_value")),
        *((RECORDING, {"name": name}, (400, "name", "invalid_value")) for name in WRONG_NAMES),
        (RECORDING, {"model": "another"}, (404, "model", "model_not_found")),
    ):
        assert refusal(create(cloning.url, recording, **fields)) == wanted
        assert voices(cloning.url)["created"] == []
    for name in ("a", "b", "c"):
        assert create(cloning.url, name=name).status_code == 200
    assert refusal(create(cloning.url, name="d")) == (400, "name", "too_many_voices")
    httpx.delete(f"{cloning.url}/v1/audio/voices/b")
    assert create(cloning.url, name="d").status_code == 200
    assert voices(cloning.url)["voices"] == ["a", "c", "d"]
    with serving(create_app(ServerSettings(endpoint=cloning.endpoint))) as without_a_folder:
        answer = create(without_a_folder)
    assert (answer.status_code, "--http-voices-dir" in answer.json()["error"]["message"]) == (400, True)


def test_voices_outlive_the_server_and_other_servers_have_them(cloning: HttpPipeline) -> None:
    create(cloning.url)
    folder = str(cloning.run_dir / "voices")
    with serving(create_app(ServerSettings(endpoint=cloning.endpoint, voices_dir=folder))) as other:
        assert voices(other)["voices"] == ["Mara"]
        create(other, name="Ben")
    assert speak(cloning, voice="ben") == f"{TOLD}{TEXT}"
    server = http_server(cloning)
    server.kill()
    until(lambda: not server.is_running(), what="the end of the server")
    wait_healthy(cloning.url)
    assert speak(cloning, voice="Ben") == f"{TOLD}{TEXT}"


def test_the_client_library_speaks_with_a_recording(cloning: HttpPipeline, tmp_path: Path) -> None:
    """Of samples; the command line has that of a file. The engine is told what is given and nothing else."""
    with OmniClient(cloning.endpoint) as client:
        of_samples = client.generate(spoken(TEXT, clip=(tone(2.0), 16_000), instructions="Slowly."))
        assert (
            said((of_samples.audio * 32767).astype("<i2").tobytes())
            == f"clip=32000@0.30 clip_rate=16000 instructions=Slowly. {TEXT}"
        )
    (tmp_path / "clip.wav").write_bytes(b"no sound")
    for wrong, error in [({"transcript": "One."}, InvalidRequest), ({"clip": tmp_path / "clip.wav"}, MalformedMedia)]:
        with pytest.raises(error):
            spoken(TEXT, **wrong)


def wav_says(path: Path) -> str:
    return said(soundfile.read(path, dtype="int16")[0].astype("<i2").tobytes())


def test_the_documented_clients_and_the_example_speak(
    cloning: HttpPipeline, preset: HttpPipeline, tmp_path: Path
) -> None:
    def run(*command: object) -> str:
        return subprocess.run(
            [sys.executable, *map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True
        ).stdout

    page = (REPOSITORY / "docs" / "client.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page.replace("ipc:///tmp/omni-x/client", "{}"), re.M | re.S)
    whole, in_parts = (next(block for block in blocks if word in block) for word in ("spoken(", "more_text"))
    (tmp_path / "mara.wav").write_bytes(RECORDING)
    assert run("-c", whole.replace("{}", cloning.endpoint)) == "English, German\n"
    assert soundfile.info(tmp_path / "tide.wav").frames > len(TEXT)
    run("-c", in_parts.replace("{}", preset.endpoint))
    assert wav_says(tmp_path / "tide.wav") == "voice=ryan The tide is full, and I am holding on."
    examples = REPOSITORY / "examples"
    text = run(examples / "openai_speech.py", "--url", cloning.url, "--recording", examples / "question.wav")
    assert "made the voice example, voice_" in text
    assert text.endswith("deleted the voice example\n")
    assert wav_says(tmp_path / "speech.wav").endswith(f"language=auto {TEXT}")


def test_the_command_line_speaks(
    cloning: HttpPipeline,
    preset: HttpPipeline,
    echo: HttpPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recording, tide = tmp_path / "mara.wav", tmp_path / "tide.wav"
    recording.write_bytes(RECORDING)
    clip = ("--clip", str(recording))
    told = "clip=32000@0.30 clip_rate=16000 instructions=Low. language=German transcript=One. "
    more = (*clip, "--instructions", "Low.", "--language", "German", "--transcript", "One.")

    def say(pipeline: HttpPipeline, *arguments: str, given: str = "") -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        return command.main([*arguments, "--save", str(tide), pipeline.endpoint])

    for pipeline, text, given, options, wanted in (
        (cloning, TEXT, "", more, told),
        (cloning, "-", TEXT, more, told),  # as a whole
        (preset, TEXT, "", ("--voice", "ryan"), "voice=ryan "),
        (preset, "-", f"{TEXT}\n", ("--voice", "ryan"), "voice=ryan "),  # as it comes
    ):
        assert say(pipeline, text, *options, given=given) == 0
        assert wav_says(tide) == f"{wanted}{TEXT}"
    assert say(preset, TEXT, "--voice", "alice") == 1
    assert "unknown_voice" in capsys.readouterr().err
    assert say(echo, TEXT) == 0  # a model that answers is asked to repeat the text
    with OmniClient(echo.endpoint) as client:
        asked = client.submit(read_aloud(TEXT)).result().audio
    assert numpy.abs(soundfile.read(tide)[0] - asked).max() < 1e-4
    assert say(echo, TEXT, *clip) == 1
    assert "--clip is for speech models" in capsys.readouterr().err


@needs_chromium
@pytest.mark.nightly
def test_the_web_page_has_what_is_written_spoken_with_a_voice_of_a_recording(cloning: HttpPipeline) -> None:
    with chromium() as browser, watched_page(browser) as page:
        open_page(page, cloning)
        expect(page.locator("#voice option")).to_have_count(0)
        ask(page, TEXT)
        expect(page.locator("#error")).to_contain_text("POST /v1/audio/voices makes one")
        create(cloning.url)
        expect(page.locator("#voice option")).to_have_text("Mara")
        expect(page.locator("#record")).to_be_hidden()
        page.locator("#system").evaluate("box => { box.value = 'Slowly.'; }")
        with page.expect_request("**/v1/audio/speech") as request:
            ask(page, "The tide is low.")
        fields = {"model": "echo-speech", "input": "The tide is low.", "voice": "Mara", "instructions": "Slowly."}
        fields |= {"speed": 1, "response_format": "pcm", "stream_format": "sse"}
        assert request.value.post_data_json == fields
        expect(page.locator("li.assistant .say").last).to_have_text("The tide is low.")
        samples = len(f"{TOLD}instructions=Slowly. The tide is low.")
        assert data(page, "audio-seconds") == pytest.approx(samples / 24_000, abs=0.001)
