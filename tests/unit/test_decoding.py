"""Errors of a body name the field at fault and what would be right, and never repeat what was sent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from omni_actors.http_server.bodies import decode
from omni_actors.http_server.chat import BODY as CHAT
from omni_actors.http_server.chat import COMPLETION_BODY, CompletionRequest
from omni_actors.http_server.errors import HttpError
from omni_actors.protocol.payloads import StructuredOutputs

HELLO = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
LONG = "x" * 1_000_000


def chat(**changes: Any) -> bytes:
    return json.dumps({**HELLO, **changes}).encode()


def content(*parts: Any) -> bytes:
    return chat(messages=[{"role": "user", "content": list(parts)}])


def refusal(body: bytes, kind: type = CHAT.kind) -> HttpError:
    with pytest.raises(HttpError) as caught:
        decode(body, kind).params_by_stage()
    assert caught.value.status == 400
    assert len(caught.value.message) < 2000
    assert len(caught.value.param or "") < 200
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "code", "said"),
    [
        (chat(temprature=1), "temprature", "unknown_parameter", "Did you mean 'temperature'?"),
        (chat(**{LONG: 1}), "x" * 100, "unknown_parameter", "no such field"),
        (chat(messages=[{"role": "user", "contnt": "x"}]), "messages[0].contnt", "unknown_parameter", "'content'"),
        (chat(messages=[{"role": "user"}]), "messages[0].content", "missing_required_parameter", "missing"),
        (chat(messages=[{"role": "usr", "content": ""}]), "messages[0].role", "invalid_value", "Did you mean 'user'?"),
        (chat(messages=[{"role": LONG}]), "messages[0].role", "invalid_value", "'user', 'system', 'developer'"),
        (chat(tools=[{"type": "funktion"}]), "tools[0].type", "invalid_value", ": must be 'function'."),
        (content({"type": "smell"}), "messages[0].content[0].type", "invalid_value", "'text', 'input_audio'"),
        (content({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url", None, "missing"),
        (chat(audio={"format": LONG}), "audio.format", "invalid_value", "'wav', 'pcm16', 'flac', 'mp3', 'opus', 'aac'"),
        (
            chat(audio={"voice": 3}),
            "audio.voice",
            "invalid_value",
            "must be a text, an object or null, not a whole number",
        ),
        (chat(messages=[]), "messages", "invalid_value", "must be a list of at least 1 item."),
        (chat(max_tokens="many"), "max_tokens", "invalid_value", "must be a whole number or null, not a text"),
        (chat(temperature=3), "temperature", "invalid_value", "must be a number of at most 2."),
        (chat(stop=""), "stop", "invalid_value", "must be"),
        (chat(stage_params={"thinker": {"tempo": 1}}), "stage_params.thinker.tempo", "unknown_parameter", "Did you"),
        (chat(stage_params={"talker": {"top_p": 9}}), "stage_params.talker.top_p", "invalid_value", "at most 1"),
        (chat(stage_params={LONG[:5000]: 1}), f"stage_params.{'x' * 64}", "invalid_value", "must be an object"),
        (chat(stage_params={"thinker": LONG}), "stage_params", "invalid_value", "limited to 65536 bytes"),
        (b'{"temperature":' + b"1" * 1_000_000 + b"}", "temperature", "invalid_value", "out of range"),
        (b'{"temperature":1e999}', "temperature", "invalid_value", "out of range"),
        (b'{"prediction":' + b"[" * 100_000, None, "invalid_json", "nested too deeply"),
        (b'{"stage_params":' + b'{"a":' * 100_000, None, "invalid_json", "nested too deeply"),
        (b'{"model":"\xff"}', None, "invalid_json", "not UTF-8"),
        (b'{"model":"a\\ud800b"', None, "invalid_json", "half"),
        (b'{"model":"echo",}', None, "invalid_json", "trailing comma"),
        (b'{"temperature":NaN}', None, "invalid_json", "byte"),
        (b"[]", None, "invalid_value", "must be an object, not a list"),
        (b"", None, "invalid_json", "it is empty"),
        (
            chat(
                messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "https://a.example/b.png"}]}]
            ),
            "messages[0].content[0].image_url",
            "invalid_value",
            'must be an object, not a text, such as {"url": ...}',
        ),
    ],
    ids=lambda given: repr(given)[:60],
)
def test_the_error_names_the_field(body: bytes, param: str | None, code: str | None, said: str) -> None:
    error = refusal(body)
    assert error.param == param
    assert said in error.message
    if code is not None:
        assert error.code == code


def completion(prompt: Any) -> CompletionRequest:
    return decode(json.dumps({"model": "echo", "prompt": prompt}).encode(), CompletionRequest)


@pytest.mark.parametrize(
    ("prompt", "meant"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([3], [3])]
)
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_one_of_these(prompt: Any, meant: str | list[int]) -> None:
    assert completion(prompt).text_or_tokens() == meant


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, "a"], "prompt"),
        ([], "prompt"),
        ("", "prompt"),
        ([[]], "prompt[0]"),
        ({}, "prompt"),
        (None, "prompt"),
        ([1, -1], "prompt[1]"),
        ([[1, 2**31]], "prompt[0][1]"),
    ],
)
def test_any_other_prompt_is_refused(prompt: Any, param: str) -> None:
    with pytest.raises(HttpError) as caught:
        completion(prompt).text_or_tokens()
    assert caught.value.param == param


def test_numbers_may_be_written_as_some_languages_write_them() -> None:
    request = decode(
        chat(max_tokens=16.0, seed="7", temperature="0.5", stage_params={"talker": {"top_k": 5.0}}), CHAT.kind
    )
    assert request.max_tokens == 16
    assert request.seed == 7
    assert request.temperature == 0.5
    assert request.params_by_stage()["talker"].top_k == 5
    with pytest.raises(HttpError, match="must be a number of at least 0"):
        decode(chat(temperature="nan"), CHAT.kind)


def test_sampling_fields_become_those_of_the_text_stage() -> None:
    request = decode(chat(stop=".", logit_bias={"5": -1}, max_tokens=3, max_completion_tokens=4, seed=1), CHAT.kind)
    assert request.stage_fields() == {"stop": (".",), "logit_bias": {5: -1.0}, "max_tokens": 4}
    assert decode(chat(stop=["a", "b"]), CHAT.kind).stage_fields() == {"stop": ("a", "b")}
    assert decode(chat(stop=None, frequency_penalty=None), CHAT.kind).stage_fields() == {}


def test_log_probabilities_are_asked_for_as_each_route_has_it() -> None:
    assert "logprobs" not in decode(chat(logprobs=False, top_logprobs=0), CHAT.kind).stage_fields()
    assert decode(chat(logprobs=True), CHAT.kind).stage_fields()["logprobs"] == 0
    assert decode(chat(logprobs=True, top_logprobs=20), CHAT.kind).stage_fields()["logprobs"] == 20
    with pytest.raises(HttpError, match="needs logprobs: true") as caught:
        decode(chat(top_logprobs=2), CHAT.kind).stage_fields()
    assert caught.value.param == "top_logprobs"
    text = json.dumps({"prompt": "a", "logprobs": 5}).encode()
    assert decode(text, CompletionRequest).stage_fields()["logprobs"] == 5


SCHEMA = {"type": "object"}
NAMED = {"name": "a", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
            StructuredOutputs(json='{"type":"object"}'),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": SCHEMA}},
            StructuredOutputs(structural_tag='{"type":"structural_tag","format":{"type":"object"}}'),
        ),
        ({"structured_outputs": None}, None),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json='{"type":"object"}')),
        ({"structured_outputs": {"json": "{}"}}, StructuredOutputs(json="{}")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
    ],
)
def test_the_form_of_an_answer(fields: dict, wanted: StructuredOutputs | None) -> None:
    body = msgspec.json.format(chat(**fields), indent=-1)  # without spaces: a schema is passed on as it was written
    assert decode(body, CHAT.kind).stage_fields().get("structured_outputs") == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "a": 1}}, "response_format.a"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": "x" * 65_536}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_a_form_that_is_none_names_the_field(fields: dict, param: str) -> None:
    with pytest.raises(HttpError) as caught:
        decode(chat(**fields), CHAT.kind).stage_fields()
    assert caught.value.param == param


def test_a_wrong_key_names_its_mapping() -> None:
    with pytest.raises(HttpError, match="logit_bias: each key must be a whole number, not a text") as caught:
        decode(chat(logit_bias={"hello": 1}), CHAT.kind)
    assert caught.value.param == "logit_bias"


def refused(**fields: Any) -> HttpError | None:
    """What is said of fields of a chat that decode, but may ask for what is not here."""
    try:
        CHAT.decoded(chat(**fields)).check()
    except HttpError as error:
        return error
    return None


NEUTRAL = {
    "tools": [None, []],
    "tool_choice": [None, "none", "auto"],
    "chat_template_kwargs": [None, {}, {"enable_thinking": False}],
    "mm_processor_kwargs": [None, {}, {"use_audio_in_video": False}, {"use_audio_in_video": True}],
    "add_generation_prompt": [None, True],
    "length_penalty": [None, 1, 1.0],
    "truncation_side": [None, "left", "right"],
    "include_reasoning": [None, True, False],
    "prompt_cache_retention": [None, "24h"],
}
ASKING = {
    "prediction": [True, 1, [1], LONG],
    "chat_template_kwargs": [{"enable_thinking": True}],
    "add_generation_prompt": [False],
    "chat_template": ["{{ messages }}"],
}


@pytest.mark.parametrize("field", NEUTRAL)
def test_a_field_that_is_not_supported_may_ask_for_nothing(field: str) -> None:
    for value in NEUTRAL[field]:
        assert refused(**{field: value}) is None, value


def test_text_completions_may_ask_for_the_best_of_one() -> None:
    assert COMPLETION_BODY.decoded(b'{"prompt": "a", "best_of": 1, "suffix": ""}').text_or_tokens() == "a"
    with pytest.raises(HttpError) as caught:
        COMPLETION_BODY.decoded(b'{"prompt": "a", "best_of": 2}')
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")


@pytest.mark.parametrize("given", [{"fps": 1}, {"use_audio_in_video": "perhaps"}])
def test_the_processor_takes_no_other_arguments(given: dict[str, Any]) -> None:
    error = refused(mm_processor_kwargs=given)
    assert error.param == f"mm_processor_kwargs.{next(iter(given))}"


@pytest.mark.parametrize("field", ASKING)
def test_a_field_that_is_not_supported_is_refused_with_any_other_value(field: str) -> None:
    for value in ASKING[field]:
        error = refused(**{field: value})
        assert error is not None, value
        assert error.param == field
        assert error.code == "unsupported_parameter"
        assert len(error.message) < 200


def test_a_schema_that_is_not_utf8_is_an_error_of_its_field() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"title": "Rome"}}}
    body = decode(chat(response_format=form).replace(b"Rome", b"R\xffme"), CHAT.kind)
    with pytest.raises(HttpError, match="it is not UTF-8") as caught:
        body.stage_fields()
    assert caught.value.param == "response_format.json_schema.schema"
