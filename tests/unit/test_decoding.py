"""Bodies: errors name the field at fault and never repeat what was sent; what would take long is not decoded."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.http_server.bodies import (
    MAX_CONTAINERS,
    MAX_QUOTES,
    MAX_TEXT_BYTES,
    MAX_TOKEN_VALUES,
    MAX_VALUES,
    SHORT,
    check_bounds,
    decode,
)
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
        (chat(messages=[]), "messages", "invalid_value", "must be a list of at least 1 item."),
        (chat(max_tokens="many"), "max_tokens", "invalid_value", "must be a whole number or null, not a text"),
        (chat(temperature=3), "temperature", "invalid_value", "must be a number of at most 2."),
        (chat(stage_params={"thinker": {"tempo": 1}}), "stage_params.thinker.tempo", "unknown_parameter", "Did you"),
        (chat(stage_params={"talker": {"top_p": 9}}), "stage_params.talker.top_p", "invalid_value", "at most 1"),
        (chat(stage_params={LONG[:5000]: 1}), f"stage_params.{'x' * 64}", "invalid_value", "must be an object"),
        (chat(stage_params={"thinker": LONG}), "stage_params", "invalid_value", "limited to 65536 bytes"),
        (b'{"temperature":' + b"1" * 1_000_000 + b"}", "temperature", "invalid_value", "out of range"),
        (b'{"prediction":' + b"[" * 100_000, None, "invalid_json", "nested too deeply"),
        (b'{"model":"\xff"}', None, "invalid_json", "not UTF-8"),
        (b'{"model":"a\\ud800b"', None, "invalid_json", "half"),
        (b'{"model":"echo",}', None, "invalid_json", "trailing comma"),
        (b'{"temperature":NaN}', None, "invalid_json", "byte"),
        (b"[]", None, "invalid_value", "must be an object, not a list"),
        (b"", None, "invalid_json", "it is empty"),
        (
            content({"type": "image_url", "image_url": "b.png"}),
            "messages[0].content[0].image_url",
            None,
            '{"url": ...}',
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


def formed(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        (formed(name="a", schema=SCHEMA, strict=True), StructuredOutputs(json='{"type":"object"}')),
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
        (formed(name="a"), "response_format.json_schema.schema"),
        (formed(name="a", schema=3), "response_format.json_schema.schema"),
        (formed(name="a", schema={"a": "x" * 65_536}), "response_format.json_schema.schema"),
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
    "prediction": LONG,
    "chat_template_kwargs": {"enable_thinking": True},
    "add_generation_prompt": False,
    "chat_template": "{{ messages }}",
}


def test_a_field_that_is_not_supported_may_ask_for_nothing_and_is_refused_with_any_other_value() -> None:
    for field, values in NEUTRAL.items():
        assert [refused(**{field: value}) for value in values] == [None] * len(values), field
    for field, value in ASKING.items():
        error = refused(**{field: value})
        assert error is not None, field
        assert (error.param, error.code) == (field, "unsupported_parameter")
        assert len(error.message) < 200


def test_text_completions_may_ask_for_the_best_of_one() -> None:
    assert COMPLETION_BODY.decoded(b'{"prompt": "a", "best_of": 1, "suffix": ""}').text_or_tokens() == "a"
    with pytest.raises(HttpError) as caught:
        COMPLETION_BODY.decoded(b'{"prompt": "a", "best_of": 2}')
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")


@pytest.mark.parametrize("given", [{"fps": 1}, {"use_audio_in_video": "perhaps"}])
def test_the_processor_takes_no_other_arguments(given: dict[str, Any]) -> None:
    error = refused(mm_processor_kwargs=given)
    assert error.param == f"mm_processor_kwargs.{next(iter(given))}"


def test_a_schema_that_is_not_utf8_is_an_error_of_its_field() -> None:
    body = decode(chat(**formed(name="city", schema={"title": "Rome"})).replace(b"Rome", b"R\xffme"), CHAT.kind)
    with pytest.raises(HttpError, match="it is not UTF-8") as caught:
        body.stage_fields()
    assert caught.value.param == "response_format.json_schema.schema"


MIB = 1 << 20
PADDING = b" " * SHORT  # so that a body is long enough to be looked at


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"{" + b",".join(b'"k%d":1' % n for n in range(MAX_VALUES + 2)) + b"}", "members"),
        (b"[" + b"1," * (MAX_VALUES + 1) + b"1]", "members"),
        (b'["a"' + b',"a"' * (MAX_VALUES + 1) + b"]", "members"),
        (b"[" * SHORT + b"[", "lists and objects"),
        (b'{"a":' * MAX_CONTAINERS + b"{", "lists and objects"),
        (b'"' + b'\\"' * MAX_QUOTES + b'"', "quotation marks"),
        (b'"":' * (MAX_QUOTES // 2), "quotation marks"),
        (b'{"a":"' + b"x" * MAX_TEXT_BYTES + b'"}', "without its media"),
        (b'{"' + b"x" * MAX_TEXT_BYTES + b'":1}', "without its media"),
        (b"{" + b" " * MAX_TEXT_BYTES + b"}", "without its media"),
        (b'{"a":"' + b"x" * MAX_TEXT_BYTES, "without its media"),
        (b'{"a":"\\",\\"data\\":","b":"' + b"x" * MAX_TEXT_BYTES + b'"}', "without its media"),
    ],
    ids=lambda given: given if isinstance(given, str) else repr(given[:12]),
)
def test_what_would_take_long_to_decode_is_refused(body: bytes, what: str) -> None:
    with pytest.raises(HttpError, match=what) as caught:
        check_bounds(body, MAX_VALUES)
    assert caught.value.status == 413
    assert caught.value.code == "body_too_large"


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_audio":{"data":"' + b"x" * 20 * MIB + b'"},"image_url":{"url" : "' + b"x" * 20 * MIB + b'"}}',
        b'{"file":{"file_data":"' + b"x" * 20 * MIB + b'"}}',
        b'{"text":"' + b"a, b, [c] {d}: " * 200_000 + b'"}',
        b'{"text":"' + b'\\"k\\": 1, ' * 200_000 + b'"}',
        b'{"text":"' + b"\\\\" * MIB + b'"}',
        b"[" + b"1," * (MAX_VALUES - 1) + b"1]",
        b"",
        b'"' + PADDING,
    ],
    ids=lambda given: repr(given[:20]),
)
def test_media_and_long_texts_pass(body: bytes) -> None:
    check_bounds(body, MAX_VALUES)


def test_a_list_of_a_million_token_ids_fits_where_it_may_be_sent() -> None:
    body = b'{"prompt":[' + b"151643," * 999_999 + b"1]}"
    check_bounds(body, MAX_TOKEN_VALUES)
    with pytest.raises(HttpError):
        check_bounds(body, MAX_VALUES)


VALUES = st.recursive(
    st.none() | st.integers() | st.text('",:[]{}\\ax'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('",:[]{}\\ax'), inner, max_size=4),
    max_leaves=20,
)


def commas(value: Any) -> int:
    """Members and items of all objects and lists, after the first one of each."""
    items = list(value.values()) if isinstance(value, dict) else value
    return max(0, len(items) - 1) + sum(map(commas, items)) if isinstance(items, list) else 0


@given(VALUES)
def test_only_what_is_outside_of_strings_counts(value: Any) -> None:
    body = PADDING + json.dumps(value).encode()
    check_bounds(body, commas(value))
    if commas(value):
        with pytest.raises(HttpError, match="members"):
            check_bounds(body, commas(value) - 1)
