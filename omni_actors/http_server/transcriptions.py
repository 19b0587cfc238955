"""The routes that write down what is said in a recording.

The model is asked for the text, as a user would ask it. It gives no times, so what has times, such as subtitles, is one
piece from the beginning of the recording to its end.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from omni_actors.client import Text
from omni_actors.errors import ErrorCode
from omni_actors.http_server.answer import DONE_EVENT, EVENTS, Answer, AnswerResponse, event, token_counts, usage_of
from omni_actors.http_server.bodies import OF_TRANSCRIPTIONS, Form, FormBody, Submission, Temperature
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.generation import (
    Language,
    TranscriptionPrompt,
    transcription_question,
    translation_question,
)
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.protocol.messages import Description, StageUsage

TRANSCRIPTION_FIELDS: dict[str, str] = {
    ErrorCode.PROMPT_TOO_LONG: "file",
    ErrorCode.MALFORMED_MEDIA: "file",
    ErrorCode.UNKNOWN_MODALITY: "model",
}

TextFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
TIMED = frozenset({"srt", "verbose_json", "vtt"})
Task = Literal["transcribe", "translate"]


class TranslationForm(Submission, frozen=True, kw_only=True):
    """The fields of POST /v1/audio/translations besides the file."""

    prompt: TranscriptionPrompt = ""
    response_format: TextFormat = "json"
    temperature: Temperature = 0.0


class TranscriptionForm(TranslationForm, frozen=True, kw_only=True):
    """The fields of POST /v1/audio/transcriptions besides the file."""

    language: Language | None = None
    stream: bool = False
    timestamp_granularities: list[Literal["segment"]] | None = None  # there is one segment: the recording
    chunking_strategy: Literal["auto"] | None = None  # the recording is heard as a whole


TRANSCRIPTION = FormBody(TranscriptionForm, OF_TRANSCRIPTIONS)
TRANSLATION = FormBody(TranslationForm, {})


async def transcriptions(request: Request, state: ServerState, form: Form[TranscriptionForm]) -> Response:
    """Write down what is said in a recording."""
    question = transcription_question(form.fields.language, form.fields.prompt)
    return await _respond(form.fields, form.files[0], "transcribe", question, request, state)


async def translations(request: Request, state: ServerState, form: Form[TranslationForm]) -> Response:
    """Write down in English what is said in a recording."""
    return await _respond(
        form.fields, form.files[0], "translate", translation_question(form.fields.prompt), request, state
    )


async def _respond(
    fields: TranslationForm, file: bytes, task: Task, question: str, request: Request, state: ServerState
) -> Response:
    stream = isinstance(fields, TranscriptionForm) and fields.stream
    if stream and fields.response_format != "json":
        raise bad_field("stream", "Events are JSON: with stream, response_format must be 'json'.", "unsupported_value")
    description = await state.describe()
    state.model_name(fields.model, description)
    if "text" not in description.outputs or description.max_media.get("audio") == 0:
        message = "This model writes nothing down: it does not hear, or does not answer in text."
        raise bad_field("model", message, "unknown_modality")
    part, seconds = await state.media.recording(file, "file")
    if fields.response_format in TIMED and not seconds:
        message = f"The file does not say its length, which {fields.response_format!r} needs: ask for 'json' or 'text'."
        raise bad_field("response_format", message, "unsupported_value")
    answer = await Answer.begin(
        request,
        state,
        fields,
        [{"role": "user", "content": [part, {"type": "text", "text": question}]}],
        TRANSCRIPTION_FIELDS,
        modalities=["text"],
        params=state.stage_params(fields.model, {}, description, {"temperature": fields.temperature}),
    )
    if stream:
        return AnswerResponse(answer, _transcript_events(answer, description), EVENTS, state.settings.write_timeout)
    async with answer:
        text = "".join([item.text async for item in answer if isinstance(item, Text)]).strip()
    return _whole(fields, task, text, seconds, token_usage(answer.usages, description))


def _whole(fields: TranslationForm, task: Task, text: str, seconds: float, usage: dict[str, Any]) -> Response:
    match fields.response_format:
        case "text":
            return PlainTextResponse(f"{text}\n")
        case "srt":
            return PlainTextResponse(f"1\n{_cue(text, seconds, ',')}", media_type="application/x-subrip")
        case "vtt":
            return PlainTextResponse(f"WEBVTT\n\n{_cue(text, seconds, '.')}", media_type="text/vtt")
        case "verbose_json":
            spoken = fields.language if isinstance(fields, TranscriptionForm) else None
            return json_response(
                {
                    "task": task,
                    "language": "en" if task == "translate" else spoken or "unknown",
                    "duration": round(seconds, 3),
                    "text": text,
                    "segments": [_segment(text, seconds, fields.temperature)] if text else [],
                    # Whole seconds, rounded up: LiteLLM refuses a fraction.
                    "usage": {"type": "duration", "seconds": math.ceil(seconds)},
                }
            )
        case "json":
            return json_response({"text": text, "usage": usage})


def _cue(text: str, seconds: float, point: str) -> str:
    """A subtitle for the whole recording; an empty line or an arrow in its text would end it."""
    milliseconds = round(seconds * 1000)
    end = f"{milliseconds // 3_600_000:02}:{milliseconds // 60_000 % 60:02}:{milliseconds // 1000 % 60:02}"
    line = " ".join(text.split()).replace("-->", "→")
    return f"00:00:00{point}000 --> {end}{point}{milliseconds % 1000:03}\n{line}\n"


def _segment(text: str, seconds: float, temperature: float) -> dict[str, Any]:
    """The recording as a segment of OpenAI's; what only Whisper knows is 0."""
    unknown: dict[str, Any] = {"avg_logprob": 0.0, "compression_ratio": 0.0, "no_speech_prob": 0.0, "tokens": []}
    place = {"id": 0, "seek": 0, "start": 0.0, "end": round(seconds, 3)}
    return {**place, "text": text, "temperature": temperature, **unknown}


async def _transcript_events(answer: Answer, description: Description) -> AsyncIterator[bytes]:
    """Stream OpenAI's transcript.text.delta and transcript.text.done events."""
    texts: list[str] = []
    async for item in answer:
        if isinstance(item, Text) and item.text:
            texts.append(item.text)
            yield event({"type": "transcript.text.delta", "delta": item.text})
    yield event(
        {"type": "transcript.text.done", "text": "".join(texts), "usage": token_usage(answer.usages, description)}
    )
    yield DONE_EVENT


def token_usage(usages: Sequence[Mapping[str, StageUsage]], description: Description) -> dict[str, Any]:
    """The usage of a transcription, as OpenAI names it."""
    return {"type": "tokens", **token_counts(usage_of(usages, description))}
