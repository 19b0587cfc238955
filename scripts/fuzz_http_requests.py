"""The well-formed requests that `fuzz_http.py` changes, one or more for each route."""

from __future__ import annotations

import base64
from typing import Any

from tests.support.servers import film, picture, sound

CHAT, COMPLETIONS, SPEECH, FILES = "/v1/chat/completions", "/v1/completions", "/v1/audio/speech", "/v1/files"
IMAGES, EDITS, RESPONSES = "/v1/images/generations", "/v1/images/edits", "/v1/responses"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
VOICES = "/v1/audio/voices"
VIDEOS, LIVE = "/v1/videos", "/v1/live/sessions"
REALTIME = "/v1/realtime?model=echo"

PICTURE, SOUND = picture(8, 8), sound(0.05)
FILM = film(0.5, with_sound=True)
PCM = base64.b64encode(bytes(4800)).decode()  # 0.1 s at 24 kHz
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}


def uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chat(content: object, *more_messages: object, **more: object) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": content}, *more_messages]
    return CHAT, {"model": "echo", "messages": messages, "max_tokens": 2, "timeout": 5, **more}


def responses(given: object, **more: object) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"model": "echo", "input": given, "max_output_tokens": 2, "timeout": 5, **more}


TOOLS = [{"type": "function", "function": FUNCTION}]
VIDEO = {"type": "video_url", "video_url": {"url": uri("video/mp4", FILM)}}
LONG_SOUND = {"type": "input_audio", "input_audio": {"data": uri("a", SOUND + bytes(60_000))[14:], "format": "wav"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
VALID = [
    chat("hi"),
    chat("hi", stream=True, stream_options={"include_usage": True}, modalities=["text", "audio"]),
    chat("hi", modalities=["text", "audio"], audio={"voice": "Ethan", "format": "wav"}, seed=7, metadata={"a": "b"}),
    chat([{"type": "image_url", "image_url": {"url": uri("image/png", PICTURE)}}, {"type": "text", "text": "x"}]),
    chat([{"type": "input_audio", "input_audio": {"data": uri("a", SOUND)[14:], "format": "wav"}}]),
    chat([VIDEO, {"type": "text", "text": "x"}], mm_processor_kwargs={"use_audio_in_video": True}),
    chat([LONG_SOUND, VIDEO, {"type": "text", "text": "x"}]),
    responses([{"role": "user", "content": [LONG_SOUND]}]),
    chat([{"type": "file", "file": {"file_id": "file-1"}}], tools=None, response_format={"type": "text"}),
    chat("hi", stage_params={"talker": {"temperature": 0.5}, "code2wav": {"num_steps": 2}}, stop_token_ids=[1, 2]),
    chat("hi", n=3, seed=1, stop=["x", "yz"], logit_bias={"5": -100}, frequency_penalty=0.5),
    chat("hi", n=2, stream=True, logprobs=True, top_logprobs=2),
    chat("hi", tools=TOOLS, tool_choice="auto", parallel_tool_calls=False),
    chat("hi", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}, stream=True),
    chat("hi", {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, tools=TOOLS),
    chat("hi", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}),
    (COMPLETIONS, {"model": "echo", "prompt": "hi", "max_tokens": 2, "stream": True, "timeout": 5}),
    (COMPLETIONS, {"model": "echo", "prompt": [[104, 105]], "max_tokens": 2, "top_k": 5, "timeout": 5}),
    (COMPLETIONS, {"model": "echo", "prompt": "hi", "max_tokens": 2, "n": 2, "logprobs": 1, "timeout": 5}),
    (IMAGES, {"prompt": "hi", "size": "64x64", "n": 2, "output_format": "webp", "background": "auto", "timeout": 5}),
    (IMAGES, {"prompt": "hi", "stream": True, "partial_images": 2, "num_inference_steps": 3, "stage_params": {}}),
    (SPEECH, {"model": "echo", "input": "hi", "voice": {"id": "Ethan"}, "response_format": "pcm", "timeout": 5}),
    responses("hi"),
    responses(
        "hi", stream=True, instructions="be brief", store=False, temperature=0.5, text={"format": {"type": "text"}}
    ),
    responses([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], modalities=["text", "audio"]),
    responses(
        [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        ],
        tools=[{"type": "function", **FUNCTION}],
        tool_choice={"type": "function", "name": "weather"},
    ),
    responses("hi", include=["message.output_text.logprobs"], top_logprobs=2, stream=True),
    responses("hi", text={"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}),
    responses("hi", previous_response_id="resp_1", stream=True, stream_options={"include_obfuscation": False}),
]
# Path, fields, and files by the name of their field.
FORMS: list[tuple[str, dict[str, str], dict[str, bytes]]] = [
    (FILES, {"purpose": "user_data"}, {"file": b"\r\n--" * 500}),
    (TRANSCRIPTIONS, {"model": "echo", "language": "en", "temperature": "0", "timeout": "5"}, {"file": SOUND}),
    (TRANSCRIPTIONS, {"stream": "true", "include[]": "", "response_format": "json", "timeout": "5"}, {"file": FILM}),
    (TRANSLATIONS, {"model": "echo", "response_format": "srt", "prompt": "x", "timeout": "5"}, {"file": SOUND}),
    (
        VOICES,
        {"name": "Mara", "transcript": "One, two.", "consent": "c", "type": "audio_sample"},
        {"audio_sample": SOUND},
    ),
    (EDITS, {"prompt": "hi", "size": "64x64", "n": "2", "timeout": "5"}, {"image[]": PICTURE}),
    (VIDEOS, {"prompt": "hi", "seconds": "0.2", "size": "32x32", "seed": "3"}, {"input_reference": PICTURE}),
    (VIDEOS, {"prompt": "hi", "seconds": "0.2", "num_inference_steps": "1"}, {}),
    (EDITS, {"prompt": "hi", "stream": "true", "partial_images": "1", "seed": "3"}, {"image": PICTURE}),
]
OFFER = {"type": "webrtc", "sdp": "v=0\r\nm=audio 9 UDP/TLS/RTP/SAVPF 111\r\n"}
LIVE_SESSION = {
    "model": "echo",
    "instructions": "be brief",
    "audio": {"format": {"type": "audio/pcm", "rate": 24_000}, "output": {"voice": "Ethan"}},
    "delegation": {"type": "client", "acknowledgement_delay_ms": 0},
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "store": True,
}
VALID += [(LIVE, {"session": LIVE_SESSION, "transport": OFFER}), (f"{LIVE}/sess_1/fork", {"transport": OFFER})]
TEXT_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
SOUND_ITEM = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": PCM}]}
EVENTS: list[dict[str, Any]] = [
    {
        "type": "session.update",
        "session": {
            "type": "realtime",
            "instructions": "be brief",
            "output_modalities": ["audio"],
            "max_output_tokens": 4,
            "audio": {
                "input": {"turn_detection": None, "format": {"type": "audio/pcm", "rate": 24_000}},
                "output": {"voice": "Ethan"},
            },
            "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}],
        },
    },
    {"type": "input_audio_buffer.append", "audio": PCM},
    {"type": "input_audio_buffer.commit"},
    {"type": "input_audio_buffer.clear"},
    {"type": "conversation.item.create", "item": TEXT_ITEM, "previous_item_id": "root"},
    {"type": "conversation.item.create", "item": SOUND_ITEM},
    {"type": "conversation.item.create", "item": {"type": "function_call_output", "call_id": "c", "output": "x"}},
    {"type": "conversation.item.truncate", "item_id": "item_1", "content_index": 0, "audio_end_ms": 10},
    {"type": "conversation.item.retrieve", "item_id": "item_1"},
    {"type": "conversation.item.delete", "item_id": "item_1"},
    {"type": "response.create", "event_id": "e", "response": {"output_modalities": ["text"], "input": [TEXT_ITEM]}},
    {"type": "response.create"},
    {"type": "response.cancel"},
]
LIVE_EVENTS: list[dict[str, Any]] = [
    {"type": "session.input_audio.append", "audio": PCM},
    {"type": "session.input_audio.mute"},
    {"type": "session.input_audio.unmute", "event_id": "e"},
    {"type": "session.commentary.append", "delegation_id": None, "content": "hi"},
    {"type": "session.thinking.append", "delegation_id": "dlg_1", "content": "hi"},
    {"type": "session.instructions.append", "delegation_id": None, "content": "be brief"},
    {"type": "session.update", "session": {"delegation": {"type": "client"}}},
    {"type": "response.item.create", "item": TEXT_ITEM},
    {"type": "response.create"},
    {"type": "session.close"},
]
SPEECH_EVENTS: list[dict[str, Any]] = [
    {"type": "session.update", "session": {"voice": "Ethan", "speed": 2, "response_format": "mp3", "seed": 1}},
    {"type": "input_text.append", "text": "The tide is full. It", "event_id": "e"},
    {"type": "input_text.flush"},
    {"type": "input_text.cancel"},
    {"type": "input_text.end"},
]
SPOKEN_MESSAGES: list[dict[str, Any]] = [
    {"text": "The tide is full. ", "context_id": "a", "voice_settings": {"stability": 0.5, "speed": 1}},
    {"text": "It turns", "context_id": "b", "flush": True},
    {"context_id": "a", "close_context": True},
    {"text": "", "context_id": "b"},
    {"close_socket": True},
]
# Path, the first event of most sessions, and further ones.
SOCKETS: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (REALTIME, [], EVENTS),
    (LIVE, [{"type": "session.start", "session": LIVE_SESSION}], LIVE_EVENTS),
    ("/v1/audio/speech/stream", [], SPEECH_EVENTS),
    ("/v1/text-to-speech/Ethan/multi-stream-input?output_format=pcm_24000", [], SPOKEN_MESSAGES),
]
