"""Bodies of requests: errors name the field and never repeat what was sent; what is asked for, and what is kept."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import VideoCreateParams, image_edit_params, image_generate_params

from omni_actors.http_server.answer import usage_of
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
from omni_actors.http_server.images import EDIT, GENERATION, ImageRequest, background_of, flattened, params_of
from omni_actors.http_server.response_events import ResponseReply, SentEvents
from omni_actors.http_server.responses import ResponsesRequest
from omni_actors.http_server.videos import BODY
from omni_actors.protocol.messages import Description, FinishReason, StageStatus, StageUsage
from omni_actors.protocol.payloads import Parameter, StageParams, StructuredOutputs

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
        (chat(logit_bias={"hello": 1}), "logit_bias", None, "each key must be a whole number, not a text"),
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


SCHEMA = {"type": "object"}


def formed(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
FORM = {"type": "json_schema", "name": "city", "schema": CITY}
LOGPROBS = {"include": ["message.output_text.logprobs"]}
LEAST = {CHAT.kind: HELLO, CompletionRequest: {"prompt": "a"}, ResponsesRequest: {"input": "hi"}}


def asked(kind: Any, **fields: Any) -> Any:
    """A body with these fields, without spaces: a schema is passed on as it was written."""
    return decode(msgspec.json.format(json.dumps({**LEAST[kind], **fields}), indent=-1).encode(), kind)


FORMS = [
    (CHAT.kind, {"response_format": {"type": "text"}}, None),
    (CHAT.kind, {"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    (CHAT.kind, formed(name="a", schema=SCHEMA, strict=True), StructuredOutputs(json='{"type":"object"}')),
    (
        CHAT.kind,
        {"response_format": {"type": "structural_tag", "format": SCHEMA}},
        StructuredOutputs(structural_tag='{"type":"structural_tag","format":{"type":"object"}}'),
    ),
    (CHAT.kind, {"structured_outputs": None}, None),
    (CHAT.kind, {"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json='{"type":"object"}')),
    (CHAT.kind, {"structured_outputs": {"json": "{}"}}, StructuredOutputs(json="{}")),
    (CHAT.kind, {"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
    (ResponsesRequest, {"text": {"format": {"type": "text"}}}, None),
    (ResponsesRequest, {"text": {"format": {"type": "json_object"}}}, StructuredOutputs(json_object=True)),
    (ResponsesRequest, {"text": {"format": {**FORM, "schema": SCHEMA}}}, StructuredOutputs(json='{"type":"object"}')),
]
COUNTS = [  # of log probabilities
    (CHAT.kind, {"logprobs": False, "top_logprobs": 0}, None),
    (CHAT.kind, {"logprobs": True}, 0),
    (CHAT.kind, {"logprobs": True, "top_logprobs": 20}, 20),
    (CompletionRequest, {"logprobs": 5}, 5),
    (ResponsesRequest, {}, None),
    (ResponsesRequest, {"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, None),
    (ResponsesRequest, LOGPROBS, 0),
    (ResponsesRequest, {**LOGPROBS, "top_logprobs": 3}, 3),
]
SAMPLING = [
    ({"stop": ".", "max_tokens": 3, "seed": 1}, {"stop": (".",), "max_tokens": 3}),
    (
        {"logit_bias": {"5": -1}, "max_tokens": 3, "max_completion_tokens": 4},
        {"logit_bias": {5: -1.0}, "max_tokens": 4},
    ),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"stop": None, "frequency_penalty": None}, {}),
]


def test_fields_become_those_of_the_text_stage() -> None:
    for fields, stage_fields in SAMPLING:
        assert asked(CHAT.kind, **fields).stage_fields() == stage_fields
    for name, rows in (("structured_outputs", FORMS), ("logprobs", COUNTS)):
        found = [asked(kind, **fields).stage_fields().get(name) for kind, fields, _ in rows]
        assert found == [wanted for *_, wanted in rows]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (CHAT.kind, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT.kind, {"response_format": {"type": "json_object", "a": 1}}, "response_format.a"),
        (CHAT.kind, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        *(
            (CHAT.kind, formed(name="a", **schema), "response_format.json_schema.schema")
            for schema in ({}, {"schema": 3}, {"schema": {"a": "x" * 65_536}})
        ),
        *(
            (CHAT.kind, {"structured_outputs": wrong}, "structured_outputs")
            for wrong in ({"json": SCHEMA, "regex": "a"}, {"json_object": False})
        ),
        (CHAT.kind, {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        (CHAT.kind, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (
            CHAT.kind,
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        (CHAT.kind, {"top_logprobs": 2}, "top_logprobs"),
        (ResponsesRequest, {"text": {"format": {**FORM, "schema": {"a": "x" * 70_000}}}}, "text.format.schema"),
        (ResponsesRequest, {"top_logprobs": 3}, "top_logprobs"),
        (ResponsesRequest, {"top_logprobs": 21}, "top_logprobs"),
        (ResponsesRequest, {"include": ["web_search_call.results"]}, "include[0]"),
        *(
            (CompletionRequest, {"prompt": prompt}, param)
            for param, *prompts in (
                ("prompt", ["a", "b"], [[1], [2]], [1, "a"], [], "", {}, None),
                ("prompt[0]", [[]]),
                ("prompt[1]", [1, -1]),
                ("prompt[0][1]", [[1, 2**31]]),
            )
            for prompt in prompts
        ),
    ],
    ids=lambda given: str(given)[:60],
)
def test_what_cannot_be_asked_for_names_the_field(kind: Any, fields: dict[str, Any], param: str) -> None:
    def ask() -> object:
        body = asked(kind, **fields)
        return body.text_or_tokens() if kind is CompletionRequest else body.stage_fields()

    with pytest.raises(HttpError) as caught:
        ask()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "meant"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([3], [3])]
)
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_one_of_these(prompt: Any, meant: str | list[int]) -> None:
    assert asked(CompletionRequest, prompt=prompt).text_or_tokens() == meant


def test_a_schema_that_is_not_utf8_is_an_error_of_its_field() -> None:
    body = decode(chat(**formed(name="city", schema={"title": "Rome"})).replace(b"Rome", b"R\xffme"), CHAT.kind)
    with pytest.raises(HttpError, match="it is not UTF-8") as caught:
        body.stage_fields()
    assert caught.value.param == "response_format.json_schema.schema"


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


def test_a_kept_response_holds_nothing_of_the_body() -> None:
    """A part of the body would hold all of it, with its media, and would not be counted."""
    tool = {"type": "function", "name": "weather", "parameters": CITY}
    body = asked(ResponsesRequest, text={"format": FORM}, tools=[tool], metadata={"a": "b"})
    description = Description("p", "m", ("text",), (), 0, True, 1, 9, ())
    kept = ResponseReply(SentEvents("resp_1", 0), "echo", None, body, description).object("completed")
    assert kept["text"] == {"format": FORM}
    assert kept["tools"][0]["parameters"] == CITY
    plain = (str, int, float, bool, type(None), dict, list)

    def check(value: Any) -> None:
        assert isinstance(value, plain)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in inner:
            check(item)

    check(kept)


def sent_before(*deltas: str) -> SentEvents:
    """The events of a response whose text came in these pieces."""
    sent = SentEvents("resp_1", 0)
    call = {"id": "fc_1_0", "call_id": "call_first"}
    events = [{"type": "response.created"}, {"type": "response.output_item.added", "output_index": 1, "item": call}]
    events += [{"type": "response.output_text.delta", "output_index": 0, "delta": delta} for delta in deltas]
    events += [{"type": "response.audio.delta", "delta": base64.b64encode(b"abcd").decode()}]
    for number, event in enumerate(events):
        data = json.dumps({**event, "sequence_number": number}).encode()
        assert sent.add(b"id: %d\nevent: x\ndata: %b\n\n" % (number, data)) == number
    assert sent.number == len(events)
    return sent


def test_what_was_sent_is_left_out_of_an_answer_that_is_made_again_in_other_pieces() -> None:
    sent = sent_before("the s", "ea")
    assert not sent.rest("response.created")
    assert sent.rest("response.in_progress")
    assert not sent.rest("response.output_item.added", output_index=1)
    assert sent.rest("response.output_item.added", output_index=0)
    texts = [
        sent.rest("response.output_text.delta", output_index=0, delta=piece) for piece in ("th", "e sea is", " salt")
    ]
    assert texts == ["", " is", " salt"]
    sounds = [sent.rest("response.audio.delta", delta=piece) for piece in (b"Abc", b"d", b"ef")]
    assert sounds == [b"", b"", b"ef"], "the last bits of sound may differ"
    assert sent.call_id("fc_1_0", "call_other") == "call_first"
    assert sent.call_id("fc_1_1", "call_other") == "call_other"


def test_another_answer_is_not_sent_as_the_rest_of_the_first() -> None:
    with pytest.raises(HttpError, match="became another one") as caught:
        sent_before("the sea").rest("response.output_text.delta", output_index=0, delta="the lake")
    assert caught.value.code == "stage_lost"


DECLARED = {
    "encoder": (Parameter("negative_prompt", "text"), Parameter("guidance_scale", "float")),
    "dit": (
        Parameter("width", "int"),
        Parameter("height", "int"),
        Parameter("num_steps", "int"),
        Parameter("guidance_scale", "float"),
        Parameter("previews", "int"),
    ),
    "vae": (),
}


def image_request(**fields: Any) -> ImageRequest:
    return msgspec.json.decode(msgspec.json.encode({"prompt": "x", **fields}), type=ImageRequest)


def drawing(parameters: dict[str, tuple[Parameter, ...]], adapters: tuple[str, ...] = ()) -> Description:
    """A pipeline whose models declare these parameters."""
    return Description("p", "m", ("image",), (), 0, True, 0, 9, (), parameters=parameters, adapters=adapters)


def test_every_field_of_openai_is_known() -> None:
    """A field that is new there shows up here, until it is decided what it means here."""
    generate = image_generate_params.ImageGenerateParamsBase.__annotations__
    assert len(generate) > 15
    assert not set(generate) - set(GENERATION.kind.__struct_fields__)
    edit = image_edit_params.ImageEditParamsBase.__annotations__
    assert set(edit) - set(EDIT.kind.__struct_fields__) == {"image", "mask"}
    videos = VideoCreateParams.__annotations__
    assert set(videos) - set(BODY.kind.__struct_fields__) == {"input_reference"}


def test_parameters_by_stage_win_and_the_models_own_are_kept() -> None:
    given = {"dit": {"num_steps": 9, "extra_args": {"shift": 3}}}
    own = {"dit": (*DECLARED["dit"], Parameter("background", "text"))}
    assert params_of(
        image_request(num_inference_steps=4, background="transparent", stage_params=given), drawing(own)
    ) == {"dit": StageParams(num_steps=9, extra_args={"background": "transparent", "shift": 3})}


def test_an_adapter_goes_to_the_stages_that_take_one() -> None:
    known = drawing({"dit": (Parameter("adapter", "text"),), "vae": ()}, adapters=("style",))
    assert params_of(image_request(model="style"), known) == {"dit": StageParams(adapter="style")}
    assert params_of(image_request(model="p"), known) == {}
    with pytest.raises(HttpError, match="takes no model") as caught:
        params_of(image_request(model="style"), drawing(DECLARED, adapters=("style",)))
    assert caught.value.param == "model"


@pytest.mark.parametrize("field", [{"background": "transparent"}, {"size": "64x64"}, {"guidance_scale": 1}])
def test_what_no_stage_takes_is_refused(field: dict) -> None:
    (name,) = field
    with pytest.raises(HttpError, match=f"This model takes no {name}; it takes num_inference_steps") as caught:
        params_of(image_request(**field), drawing({"dit": (Parameter("num_steps", "int"),)}))
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def test_a_picture_is_put_on_white() -> None:
    pixels = numpy.array([[[255, 0, 0, 255], [255, 0, 0, 0], [0, 0, 0, 128]]], numpy.uint8)
    assert flattened(pixels).tolist() == [[[255, 0, 0], [255, 255, 255], [127, 127, 127]]]
    assert background_of(pixels) == "transparent"
    assert background_of(flattened(pixels)) == background_of(pixels[:, :1]) == "opaque"


# Tokens read and written by each stage. A vocoder counts steps, a stage that changes audio counts pieces.
WORK = {"prompt": (0, 5), "thinker": (5, 7), "talker": (9, 40), "code2wav": (40, 100), "leveller": (3, 3)}
SPEAKING = ["prompt", "thinker", "talker", "code2wav"]
BOTH = {"text": "thinker", "audio": "code2wav"}


def speaking_pipeline(order: list[str], outputs: dict[str, str]) -> Description:
    stages = tuple(StageStatus(name, replica, 1, "ready", 1, 0) for name in order for replica in (0, 1))
    return Description(
        "p", "m", tuple(outputs), (), 24_000, True, in_flight=1, max_in_flight=1, stages=stages, outputs=outputs
    )


@pytest.mark.parametrize(
    ("order", "outputs", "ran", "audio_tokens"),
    [
        (SPEAKING, BOTH, SPEAKING, 40),
        (SPEAKING, BOTH, SPEAKING[:2], 0),
        ([*SPEAKING, "leveller"], {"text": "thinker", "audio": "leveller"}, [*SPEAKING, "leveller"], 40),
        (["prompt", "talker", "code2wav"], {"audio": "code2wav"}, ["prompt", "talker", "code2wav"], 40),
        (["prompt", "thinker", "code2wav"], BOTH, ["prompt", "thinker", "code2wav"], 0),
    ],
)
def test_audio_tokens_are_those_generated_for_the_audio(
    order: list[str], outputs: dict[str, str], ran: list[str], audio_tokens: int
) -> None:
    reported = {
        name: StageUsage(FinishReason.STOP, input_tokens=WORK[name][0], output_tokens=WORK[name][1]) for name in ran
    }
    shown = usage_of([reported], speaking_pipeline(order, outputs))
    text_tokens = 7 if "text" in outputs else 0
    assert shown["completion_tokens_details"] == {"text_tokens": text_tokens, "audio_tokens": audio_tokens}
    assert shown["completion_tokens"] == text_tokens + audio_tokens
    assert shown["prompt_tokens"] == (5 if "text" in outputs else 0)
    assert shown["total_tokens"] == shown["prompt_tokens"] + shown["completion_tokens"]
    assert list(shown["stages"]) == ran
