"""The routes below /v1/audio: speech of a text, transcriptions, and voices.

The model is asked for the text, as a user would ask it. It gives no times, so what has times, such as subtitles, is one
piece from the beginning of the recording to its end.

A pipeline of a speech model speaks the text that it is given (`Description.speech`). One that answers has no stage for
that: its model is asked to repeat the text and speaks its own answer, which is nearly always the same. The events of
`stream_format: "sse"` contain the text that was really spoken.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from omni_actors.client import Audio, Text
from omni_actors.client.prompts import read_aloud, speech_ability
from omni_actors.errors import ErrorCode, suggest
from omni_actors.http_server.answer import (
    DONE_EVENT,
    EVENTS,
    MEDIA_TYPES,
    Answer,
    AnswerResponse,
    Samples,
    WholeAnswer,
    encoded,
    encoded_pieces,
    event,
    token_counts,
    usage_of,
)
from omni_actors.http_server.bodies import (
    ANY,
    OF_TRANSCRIPTIONS,
    Form,
    FormBody,
    JsonBody,
    StagedSubmission,
    Strict,
    Submission,
    Temperature,
)
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.generation import (
    Language,
    TranscriptionPrompt,
    VoiceId,
    transcription_question,
    translation_question,
)
from omni_actors.http_server.state import ID, ServerState, Voice, json_response, no_voice
from omni_actors.protocol.messages import Description, StageUsage
from omni_actors.protocol.payloads import AUTO, CLIP, CLIP_RATE, INSTRUCTIONS, LANGUAGE, TRANSCRIPT, SpeechAbility

SAMPLE = "audio_sample"
QUIET = 10 ** (-50 / 20)  # of full scale: the loudest tenth of a second of a recording with a voice in it exceeds it
QUIET_SECONDS = 0.1
MAX_TRANSCRIPT = 2048

PRINTED = r"[^\x00-\x20\x7f/]"  # no control character, no space, and no slash, which would end the name in a URL
VoiceName = Annotated[str, Meta(min_length=1, max_length=64, pattern=rf"^{PRINTED}+(?: {PRINTED}+)*\Z")]


class VoiceForm(Strict, frozen=True, kw_only=True):
    """The fields of POST /v1/audio/voices besides the recording."""

    name: VoiceName
    transcript: Annotated[str, Meta(min_length=1, max_length=MAX_TRANSCRIPT)] | None = None
    model: str | None = None  # the first of those that are served, like "auto"
    type: Literal["audio_sample"] | None = None


VOICE_BODY = FormBody(VoiceForm, {"consent": ANY}, SAMPLE)


async def voices(request: Request, state: ServerState) -> Response:
    """The values of `audio.voice` and `voice`: voices, and further names for some of them."""
    voices = list((await state.describe()).voices)
    created = await asyncio.to_thread(state.voices.all)
    aliases = {name: voice for name, voice in state.voice_aliases(voices).items() if name not in voices}
    names = [*voices, *(voice.name for voice in created)]
    return json_response({"voices": names, "aliases": aliases, "created": [_shown(voice) for voice in created]})


async def create(request: Request, state: ServerState, form: Form[VoiceForm]) -> Response:
    """Make a voice of a recording."""
    description = await state.facts()
    state.model_name(None if form.fields.model == "auto" else form.fields.model, description)
    ability = speech_ability(description)
    if ability is None or ability.clip == "none":
        message = "This pipeline speaks with the voices of its model only: it takes none of a recording."
        raise bad_field(SAMPLE, message, "unsupported_parameter")
    name = form.fields.name
    taken = {each.casefold() for each in (*description.voices, *state.settings.voice_aliases, "default")}
    if name.casefold() in taken or name.startswith(ID):
        raise bad_field("name", f"{name!r} is a name of this pipeline's own: choose another one.")
    rate = description.sample_rate
    samples = await state.media.samples(form.files[0], SAMPLE, rate, ability.max_clip_seconds)
    if len(samples) < ability.min_clip_seconds * rate:
        seconds = f"{len(samples) / rate:.2f} s; it takes {ability.min_clip_seconds:g} s to know a voice."
        raise bad_field(SAMPLE, f"The recording lasts {seconds}")
    if loudest(samples, rate) < QUIET:
        raise bad_field(SAMPLE, "The recording is silent, or nearly so: record the voice louder.")
    voice = Voice(name, int(time.time()), rate, len(samples), form.fields.transcript)
    await asyncio.to_thread(state.voices.add, voice, samples)
    return json_response(_shown(voice))


async def voice(request: Request, state: ServerState) -> Response:
    """A voice that a client has made, by its name or id."""
    name = request.path_params["name"]
    found = await asyncio.to_thread(state.voices.find, name)
    if found is None:
        raise no_voice(name)
    return json_response(_shown(found))


async def delete(request: Request, state: ServerState) -> Response:
    """Delete a voice that a client has made. Requests that speak with it already go on."""
    name = request.path_params["name"]
    removed = await asyncio.to_thread(state.voices.remove, name)
    if removed is None:
        raise no_voice(name)
    return json_response({"id": removed.id, "object": "audio.voice", "name": removed.name, "deleted": True})


async def recording_of(given: str | VoiceId | None, state: ServerState) -> tuple[Voice, numpy.ndarray]:
    """The voice that a request asks for, with its recording: f32 [samples].

    Raises:
        HttpError: 400 if it asks for none, or for one that is not there.
    """
    name = given.id if isinstance(given, VoiceId) else given
    alias_of = state.settings.voice_aliases.get(name or "", name)
    if alias_of in (None, "default"):
        message = "voice: this model speaks with the voice of a recording. POST /v1/audio/voices makes one: name it."
        raise bad_field("voice", message, "missing_required_parameter")
    found = await asyncio.to_thread(state.voices.find, alias_of)
    if found is None:
        names = ", ".join(each.name for each in await asyncio.to_thread(state.voices.all)) or "none yet"
        message = f"There is no voice {alias_of[:100]!r}; the voices are {names}. POST /v1/audio/voices makes one."
        raise bad_field("voice", message, "unknown_voice")
    return found, await asyncio.to_thread(state.voices.samples, found)


def loudest(samples: numpy.ndarray, rate: int) -> float:
    """Effective value of the loudest piece of a recording, of `QUIET_SECONDS`."""
    length = min(int(QUIET_SECONDS * rate), len(samples))
    pieces = samples[: len(samples) // length * length].reshape(-1, length)
    return float(numpy.sqrt((pieces.astype(numpy.float64) ** 2).mean(axis=1).max()))


def _shown(voice: Voice) -> dict[str, Any]:
    recording = {"seconds": round(voice.seconds, 3), "transcript": voice.transcript}
    return {"id": voice.id, "object": "audio.voice", "name": voice.name, "created_at": voice.created, **recording}


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


MAX_SPEECH_TEXT = 4096
FIELDS: dict[str, str] = {
    ErrorCode.UNKNOWN_VOICE: "voice",
    ErrorCode.UNKNOWN_MODALITY: "model",
    ErrorCode.PROMPT_TOO_LONG: "input",
    # The clip and what is said in it belong to the voice that the request names.
    **dict.fromkeys((CLIP, CLIP_RATE, TRANSCRIPT), "voice"),
}


class SpeechRequest(StagedSubmission, frozen=True, kw_only=True):
    """Body of POST /v1/audio/speech."""

    input: Annotated[str, Meta(min_length=1, max_length=MAX_SPEECH_TEXT)]
    voice: str | VoiceId | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm", "aac"] = "mp3"
    stream_format: Literal["audio", "sse"] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None  # OpenAI's range; only 1 is possible
    instructions: Annotated[str, Meta(max_length=MAX_SPEECH_TEXT)] | None = None
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


BODY = JsonBody(SpeechRequest, {})


async def speech(request: Request, state: ServerState, body: SpeechRequest) -> Response:
    """Speak a text. The audio is sent while it is generated."""
    if body.speed not in (None, 1):
        message = "speed must be 1: the voice has one speed. Its manner can be asked for in instructions."
        raise bad_field("speed", message, "unsupported_value")
    description, _ = await state.model(body.model)
    ability = speech_ability(description)
    if ability is not None:
        prompt, options = await _spoken(body, state, description, ability)
    else:
        prompt, options = await _read_aloud(body, state, description)
    answer = await Answer.begin(
        request,
        state,
        body,
        prompt,
        FIELDS,
        **options,
        params=state.stage_params(body.model, body.params_by_stage(), description, {}),
    )
    timeout = state.settings.write_timeout
    if body.stream_format == "sse":
        given = body.input if ability is not None else None
        events = _events(answer, body.response_format, description, given)
        return AnswerResponse(answer, events, EVENTS, timeout)
    if body.response_format == "flac" and body.stream_format is None:
        # FLAC states its length at the beginning. A stream cannot, so readers such as libsndfile fail at its end;
        # therefore FLAC is streamed only on explicit request.
        async with answer:
            whole = WholeAnswer()
            async for item in answer:
                whole.add(item)
            file = await encoded(whole.samples, "flac", description.sample_rate)
            return Response(file, media_type=MEDIA_TYPES["flac"])
    pieces = _encoded(answer, body.response_format, description, [])
    return AnswerResponse(answer, pieces, MEDIA_TYPES[body.response_format], timeout)


async def _read_aloud(body: SpeechRequest, state: ServerState, description: Description) -> tuple[str, dict[str, Any]]:
    """What a model that answers is asked, and options for the pipeline."""
    if body.language is not None:
        message = "This model finds the language of a text out by itself: leave language out."
        raise bad_field("language", message, "unsupported_parameter")
    voice = state.voice(body.voice, description, "voice")
    return read_aloud(body.input, body.instructions), {"modalities": ["text", "audio"], "voice": voice}


async def _spoken(
    body: SpeechRequest, state: ServerState, description: Description, ability: SpeechAbility
) -> tuple[str, dict[str, Any]]:
    """The text for a model that speaks it, and options for the pipeline.

    Raises:
        HttpError: 400 for what this model does not take, or takes and does not get.
    """
    information: dict[str, Any] = {}
    if body.language is not None:
        languages = {name.casefold(): name for name in (*ability.languages, AUTO)}
        if body.language.casefold() not in languages:
            nearest = suggest(body.language, list(languages.values()))
            raise bad_field("language", f"language must be one of {', '.join(languages.values())}.{nearest}")
        information[LANGUAGE] = languages[body.language.casefold()]
    if body.instructions and ability.instructions == "none":
        message = "This model takes no instructions: it speaks in the manner of its voice."
        raise bad_field("instructions", message, "unsupported_parameter")
    if body.instructions:
        information[INSTRUCTIONS] = body.instructions
    elif ability.instructions == "required":
        message = "instructions: this model makes up a voice: describe it, and how it speaks."
        raise bad_field("instructions", message, "missing_required_parameter")
    if ability.clip == "none":
        voice = state.voice(body.voice, description, "voice")
        known = {name.casefold(): name for name in description.voices}
        voice = known.get(voice.casefold(), voice) if voice is not None else None
        return body.input, {"modalities": ["audio"], "voice": voice, "additional_information": information}
    recorded, samples = await recording_of(body.voice, state)
    information |= {CLIP: samples, CLIP_RATE: recorded.rate}
    if recorded.transcript is not None:
        information[TRANSCRIPT] = recorded.transcript
    return body.input, {"modalities": ["audio"], "additional_information": information}


async def _encoded(answer: Answer, name: str, description: Description, texts: list[str]) -> AsyncIterator[bytes]:
    """Encode the sound of an answer; its text goes into `texts`."""

    async def sound() -> AsyncIterator[Samples]:
        async for item in answer:
            if isinstance(item, Text):
                texts.append(item.text)
            elif isinstance(item, Audio):
                yield item.samples

    async for data in encoded_pieces(sound(), name, description.sample_rate):
        yield data


async def _events(answer: Answer, name: str, description: Description, given: str | None) -> AsyncIterator[bytes]:
    """Stream OpenAI's speech.audio.delta and speech.audio.done events, the latter with the spoken text.

    Args:
        given: that text, if the model speaks what it is given; `None` if it answers.
    """
    texts: list[str] = []
    async for data in _encoded(answer, name, description, texts):
        yield event({"type": "speech.audio.delta", "audio": data})
    usage = token_counts(usage_of(answer.usages, description))
    transcript = "".join(texts) if given is None else given
    yield event({"type": "speech.audio.done", "usage": usage, "transcript": transcript})
