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
from omni_actors.http_server.realtime.config import (
    AnyEvent,
    AudioFields,
    InputAudioFields,
    OutputAudioFields,
    ResponseAudio,
    ResponseFields,
    SemanticVad,
    ServerVad,
    SessionFields,
    Transcription,
    event_id_of,
    parse,
)
from omni_actors.http_server.realtime.formats import WireFormat
from tests.support.realtime import known_types

OURS = {kind.__struct_config__.tag: kind for kind in get_args(AnyEvent)}
THEIRS = known_types(RealtimeClientEvent)


def test_every_event_of_a_client_is_known_and_has_openais_fields() -> None:
    ours = {name: {*kind.__struct_fields__, "type"} for name, kind in OURS.items()}
    assert ours == {name: set(kind.model_fields) for name, kind in THEIRS.items()}


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
        ({"type": "input_audio_buffer.append", "audio": "###"}, "audio", "invalid_base64"),
        ({"type": "input_audio_buffer.commit", "now": True}, "now", "unknown_parameter"),
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


def test_the_id_of_a_bad_event_is_found() -> None:
    assert event_id_of(b'{"type": "no", "event_id": "e1"}') == "e1"
    for data in (b'{"type": "no", "event_id": 7}', b'{"type": "no"}', b"[1]", b"{", b'"\xff"', b"[" * 100_000):
        assert event_id_of(data) is None


def audio_of(kind: str, null: dict[str, None]) -> dict[str, Any]:
    return {"input": {"turn_detection": {"type": kind, **null}}}


Given = Callable[[dict[str, None]], tuple[Any, dict[str, Any]]]
WITH_FIELDS: list[tuple[type[msgspec.Struct], Given]] = [
    (ResponseFields, lambda null: (AnyEvent, {"type": "response.create", "response": null})),
    (ResponseAudio, lambda null: (AnyEvent, {"type": "response.create", "response": {"audio": null}})),
    (SessionFields, lambda null: (SessionFields, null)),
    (AudioFields, lambda null: (SessionFields, {"audio": null})),
    (InputAudioFields, lambda null: (SessionFields, {"audio": {"input": null}})),
    (WireFormat, lambda null: (SessionFields, {"audio": {"input": {"format": {"type": "audio/pcm", **null}}}})),
    (ServerVad, lambda null: (SessionFields, {"audio": audio_of("server_vad", null)})),
    (SemanticVad, lambda null: (SessionFields, {"audio": audio_of("semantic_vad", null)})),
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
