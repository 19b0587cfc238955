"""The events of realtime sessions, compared with the types of the `openai` package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from openai.types.realtime import (
    AudioTranscription,
    RealtimeAudioConfigInput,
    RealtimeAudioConfigOutput,
    RealtimeClientEvent,
    RealtimeResponseCreateParams,
    RealtimeSessionCreateRequest,
)
from openai.types.realtime.realtime_audio_input_turn_detection import SemanticVad as OpenAISemanticVad
from openai.types.realtime.realtime_audio_input_turn_detection import ServerVad as OpenAIServerVad

from omni_actors.http_server.bodies import decode
from omni_actors.http_server.errors import HttpError
from omni_actors.http_server.generation import OutputText
from omni_actors.http_server.realtime.config import (
    AnyEvent,
    AudioFields,
    CreateResponse,
    FunctionCall,
    FunctionCallOutput,
    GivenMessage,
    InputAudioFields,
    InputSound,
    OutputAudioFields,
    OutputSound,
    ResponseAudio,
    ResponseFields,
    SemanticVad,
    ServerVad,
    SessionFields,
    ShownPicture,
    Transcription,
    event_id_of,
    parse,
)
from omni_actors.http_server.realtime.formats import WireFormat
from tests.support.realtime import known_types

OURS = {kind.__struct_config__.tag: kind for kind in get_args(AnyEvent)}
THEIRS = known_types(RealtimeClientEvent)


def test_every_event_of_a_client_is_known() -> None:
    assert set(OURS) == set(THEIRS)


@pytest.mark.parametrize("name", OURS)
def test_events_have_openais_fields(name: str) -> None:
    assert {*OURS[name].__struct_fields__, "type"} == set(THEIRS[name].model_fields)


@pytest.mark.parametrize(
    ("ours", "theirs", "extensions"),
    [
        (SessionFields, RealtimeSessionCreateRequest, {"seed", "stage_params"}),
        (ResponseFields, RealtimeResponseCreateParams, {"seed", "stage_params"}),
        (InputAudioFields, RealtimeAudioConfigInput, set()),
        (Transcription, AudioTranscription, set()),
        (OutputAudioFields, RealtimeAudioConfigOutput, set()),
        (ServerVad, OpenAIServerVad, set()),
        (SemanticVad, OpenAISemanticVad, set()),
    ],
)
def test_configurations_have_openais_fields(ours: Any, theirs: Any, extensions: set[str]) -> None:
    """A field that is not supported is known, so that its refusal says so."""
    assert set(ours.__struct_fields__) - extensions == set(theirs.model_fields) - {"type"} | (
        {"type"} & set(ours.__struct_fields__)
    )


@pytest.mark.parametrize(
    ("event", "param", "code"),
    [
        ({"type": "session.fly"}, "type", "invalid_value"),
        ({}, "type", "missing_required_parameter"),
        ({"type": "input_audio_buffer.append", "audio": "###"}, "audio", "invalid_base64"),
        ({"type": "input_audio_buffer.append"}, "audio", "missing_required_parameter"),
        ({"type": "input_audio_buffer.commit", "now": True}, "now", "unknown_parameter"),
        ({"type": "session.update"}, "session", "missing_required_parameter"),
        ({"type": "conversation.item.create", "item": {"type": "mcp_call"}}, "item.type", "invalid_value"),
        (
            {"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": -1},
            "audio_end_ms",
            "invalid_value",
        ),
        ({"type": "response.create", "response": {"max_output_tokens": 0}}, "response.max_output_tokens", None),
    ],
)
def test_a_bad_event_names_the_field(event: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(HttpError) as caught:
        parse(msgspec.json.encode(event))
    assert caught.value.param == param
    assert code is None or caught.value.code == code


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b'{"type": "no", "event_id": "e1"}', "e1"),
        (b'{"type": "no", "event_id": 7}', None),
        (b'{"type": "no"}', None),
        (b"[1]", None),
        (b"{", None),
        (b'"\xff"', None),
        (b"[" * 100_000, None),
    ],
)
def test_the_id_of_a_bad_event_is_found(data: bytes, wanted: str | None) -> None:
    assert event_id_of(data) == wanted


def session_of(**fields: Any) -> tuple[Any, dict[str, Any]]:
    return SessionFields, fields


def event_of(kind: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
    return AnyEvent, {"type": kind, **fields}


def item_of(kind: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
    return AnyEvent, {"type": "conversation.item.create", "item": {"type": kind, **fields}}


def message_of(kind: str, **fields: Any) -> tuple[Any, dict[str, Any]]:
    return item_of("message", role="user", content=[{"type": kind, **fields}])


Given = Callable[[dict[str, None]], tuple[Any, dict[str, Any]]]
WITH_FIELDS: list[tuple[type[msgspec.Struct], Given]] = [
    (CreateResponse, lambda null: event_of("response.create", **null)),
    (ResponseFields, lambda null: event_of("response.create", response=null)),
    (ResponseAudio, lambda null: event_of("response.create", response={"audio": null})),
    (SessionFields, lambda null: session_of(**null)),
    (AudioFields, lambda null: session_of(audio=null)),
    (InputAudioFields, lambda null: session_of(audio={"input": null})),
    (OutputAudioFields, lambda null: session_of(audio={"output": null})),
    (WireFormat, lambda null: session_of(audio={"input": {"format": {"type": "audio/pcm", **null}}})),
    (ServerVad, lambda null: session_of(audio={"input": {"turn_detection": {"type": "server_vad", **null}}})),
    (SemanticVad, lambda null: session_of(audio={"input": {"turn_detection": {"type": "semantic_vad", **null}}})),
    (FunctionCall, lambda null: item_of("function_call", name="f", arguments="{}", **null)),
    (FunctionCallOutput, lambda null: item_of("function_call_output", call_id="call_1", output="1", **null)),
    (GivenMessage, lambda null: item_of("message", role="user", content=[{"type": "input_text", "text": "a"}], **null)),
    (InputSound, lambda null: message_of("input_audio", audio="AAAA", **null)),
    (ShownPicture, lambda null: message_of("input_image", image_url="data:", **null)),
    (OutputSound, lambda null: message_of("output_audio", transcript="a", **null)),
    (OutputText, lambda null: message_of("output_text", text="a", **null)),
    (Transcription, lambda null: session_of(audio={"input": {"transcription": null}})),
]


@pytest.mark.parametrize(("kind", "given"), WITH_FIELDS, ids=[kind.__name__ for kind, _ in WITH_FIELDS])
def test_null_is_as_good_as_absent(kind: type[msgspec.Struct], given: Given) -> None:
    """But for what null turns off."""
    union, fields = given({})
    absent = decode(msgspec.json.encode(fields), union)
    optional = [field.encode_name for field in msgspec.structs.fields(kind) if not field.required]
    for name in optional:
        null = decode(msgspec.json.encode(given({name: None})[1]), union)
        assert (null == absent) is (name not in ("turn_detection", "transcription")), name
    assert optional
