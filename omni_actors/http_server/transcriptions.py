"""The routes that write down what is said in a recording.

An omni model is asked for the text, as a user would ask it; a model of hearing (`Description.hearing`) writes nothing
else. Where another stage gives words their times (`Description.aligning`), what has times, such as subtitles, is cut at
sentences; elsewhere it is a piece for each part of the recording that was heard as a whole. A recording that is too
long for a model is cut at quiet places, as in Qwen's package `qwen-asr`, and its parts are requests.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import unicodedata
from bisect import bisect
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from omni_actors.client import ChoiceItem, Text, WordTimes
from omni_actors.errors import OmniError
from omni_actors.http_server.answer import (
    DONE_EVENT,
    EVENTS,
    Answer,
    AnswerResponse,
    event,
    request_options,
    token_counts,
    usage_of,
)
from omni_actors.http_server.bodies import OF_TRANSCRIPTIONS, Form, FormBody, Submission, Temperature, reserve
from omni_actors.http_server.ears import to_write_down
from omni_actors.http_server.encoders import Samples, encode
from omni_actors.http_server.errors import HttpError, bad_field, fields_at_fault
from omni_actors.http_server.generation import Language, TranscriptionPrompt
from omni_actors.http_server.speech.recital import SentenceCutter, request_ids
from omni_actors.http_server.state import ServerState, json_response
from omni_actors.media.limits import AUDIO_RATE
from omni_actors.protocol.messages import Description, StageUsage
from omni_actors.protocol.payloads import HearingAbility, WordTime

SEARCH_SECONDS = 5.0  # before and after where a cut would be, for a quiet place
QUIET_SECONDS = 0.1
LEAST_SECONDS = 0.5  # of the last part, which silence follows
FIELDS = fields_at_fault("file", "file")

TextFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
LONGEST_SEGMENT = 7.0  # seconds
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
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    chunking_strategy: Literal["auto"] | None = None  # the recording is heard as a whole

    @property
    def timed(self) -> bool:
        """Whether the times of words are asked for."""
        return "word" in (self.timestamp_granularities or ())


TRANSCRIPTION = FormBody(TranscriptionForm, OF_TRANSCRIPTIONS)
TRANSLATION = FormBody(TranslationForm, {})


async def transcriptions(request: Request, state: ServerState, form: Form[TranscriptionForm]) -> Response:
    """Write down what is said in a recording."""
    return await _respond(form.fields, form.files[0].data, "transcribe", request, state)


async def translations(request: Request, state: ServerState, form: Form[TranslationForm]) -> Response:
    """Write down in English what is said in a recording."""
    fields = TranscriptionForm(**msgspec.structs.asdict(form.fields))
    return await _respond(fields, form.files[0].data, "translate", request, state)


def _check(fields: TranscriptionForm, task: Task, description: Description) -> None:
    """Raise `HttpError` 400 for fields that do not go together, or that the pipeline which writes down cannot do."""
    if fields.stream and fields.response_format != "json":
        raise bad_field("stream", "Events are JSON: with stream, response_format must be 'json'.", "unsupported_value")
    if "text" not in description.outputs or description.max_media.get("audio") == 0:
        message = "This model writes nothing down: it does not hear, or does not answer in text."
        raise bad_field("model", message, "unknown_modality")
    if description.hearing is not None and task == "translate":
        message = "This model writes down what it hears in the language that is spoken; it does not translate."
        raise bad_field("model", message, "unsupported_value")
    if fields.timed and description.aligning is None:
        message = "This pipeline does not know when words are said: ask for segments."
        raise bad_field("timestamp_granularities", message, "unsupported_value")
    if fields.timed and fields.response_format != "verbose_json":
        message = "Times of words are in verbose_json alone."
        raise bad_field("timestamp_granularities", message, "unsupported_value")


async def _respond(
    fields: TranscriptionForm, file: bytes, task: Task, request: Request, state: ServerState
) -> Response:
    state.model_name(fields.model, await state.facts())
    client, description = await state.transcriber()
    _check(fields, task, description)
    hearing = description.hearing
    aligning = description.aligning if fields.response_format in TIMED and task == "transcribe" else None
    parts = await parts_of(file, state, [ability for ability in (hearing, aligning) if ability is not None])
    if fields.response_format in TIMED and not parts[-1].end:
        message = f"The file does not say its length, which {fields.response_format!r} needs: ask for 'json' or 'text'."
        raise bad_field("response_format", message, "unsupported_value")
    about: dict[str, Any] = {"language": fields.language or "", "prompt": fields.prompt}
    about["translates"] = task == "translate"
    sounds = [to_write_down({"type": "audio", "audio": part.data}, description, **about) for part in parts]
    options = {
        "modalities": ["text"] if aligning is None else ["text", "words"],
        "params": state.stage_params(fields.model, {}, description, {"temperature": fields.temperature}),
        "seed": fields.seed,
        **request_options(request, state, fields),
    }
    try:
        streams = await client.submit_all(
            {**sound, "request_id": name, **options}
            for sound, name in zip(sounds, request_ids(request.state.request_id), strict=False)
        )
    except OmniError as error:
        raise HttpError.of(error, FIELDS) from error
    answer = await Answer.of(streams, request, state, FIELDS)
    if fields.stream:
        return AnswerResponse(answer, _transcript_events(answer, description), EVENTS, state.settings.write_timeout)
    async with answer:
        return _whole(fields, task, await _heard(answer, parts, description))


class Stretch(NamedTuple):
    """A part of a recording: a file, and where it begins and ends, in seconds."""

    data: bytes
    start: float
    end: float


def quiet_cuts(samples: Samples, rate: int, seconds: float) -> list[int]:
    """Where samples f32 [n] at `rate` Hz are cut into parts of about `seconds`, which are more than `SEARCH_SECONDS`.

    Each cut is at the quietest sample of the quietest tenth of a second around.
    """
    cuts, start, quiet = [], 0, round(QUIET_SECONDS * rate)
    while len(samples) - start > seconds * rate:
        begin = start + round((seconds - SEARCH_SECONDS) * rate)
        loudness = numpy.abs(samples[begin : begin + round(2 * SEARCH_SECONDS * rate)])
        sums = numpy.cumsum(loudness, dtype=numpy.float64)
        place = int(numpy.argmin(sums[quiet:] - sums[:-quiet])) + 1 if len(loudness) > quiet else 0
        start = begin + place + int(numpy.argmin(loudness[place : place + quiet]))
        cuts.append(start)
    return cuts


async def parts_of(file: bytes, state: ServerState, abilities: Sequence[HearingAbility]) -> list[Stretch]:
    """The parts of an uploaded recording: itself if the models hear it as a whole; its end is 0 if it does not say it.

    Args:
        abilities: those of the models; none of one whose limit is that of all media.

    Raises:
        HttpError: 400 or 413, as for the media of messages.
    """
    seconds = await state.media.seconds(file, "file")
    most = min((ability.max_seconds for ability in abilities), default=math.inf) - SEARCH_SECONDS
    if 0 < seconds <= most or not abilities:
        return [Stretch(file, 0.0, seconds)]
    longest = state.settings.audio_seconds
    reserve(round((seconds or longest) * AUDIO_RATE) * numpy.dtype(numpy.float32).itemsize)
    samples = await state.media.samples(file, "file", AUDIO_RATE, longest)
    return await asyncio.to_thread(_cut, samples, most)


def _cut(samples: Samples, seconds: float) -> list[Stretch]:
    places = [0, *quiet_cuts(samples, AUDIO_RATE, seconds), len(samples)]
    parts = []
    for start, end in itertools.pairwise(places):
        silence = max(0, round(LEAST_SECONDS * AUDIO_RATE) - (end - start))
        data = encode(numpy.pad(samples[start:end], (0, silence)), "flac", AUDIO_RATE)
        parts.append(Stretch(data, start / AUDIO_RATE, end / AUDIO_RATE))
    return parts


class Said(NamedTuple):
    """What is said from `start` to `end`, in seconds."""

    start: float
    end: float
    text: str


class Transcript(NamedTuple):
    """What is said in a recording of `seconds`, in segments, and word by word if the pipeline knows that.

    Args:
        language: as the model names it; "" if it does not.
    """

    text: str
    segments: list[Said]
    words: list[Said]
    seconds: float
    language: str
    usage: dict[str, Any]


async def _heard(answer: Answer, parts: Sequence[Stretch], description: Description) -> Transcript:
    """What is said in the parts of a recording. Raises `HttpError` if the answer fails."""
    texts = [""] * len(parts)
    times: list[tuple[WordTime, ...]] = [()] * len(parts)
    async for part, item in answer.choices():
        texts[part] += item.text if isinstance(item, Text) else ""
        times[part] = item.words if isinstance(item, WordTimes) else times[part]
    text = ""
    for said in map(str.strip, texts):
        text += gap(text, said) + said
    languages = [usage[description.outputs["text"]].language for usage in answer.usages]
    found = list(zip(parts, texts, times, strict=True))
    return Transcript(
        text,
        [one for part, said, words in found for one in cut_at_sentences(part, said, words)],
        [Said(part.start + one.start, part.start + one.end, one.word) for part, _, words in found for one in words],
        parts[-1].end,
        ",".join(dict.fromkeys(filter(None, languages))).lower(),
        token_usage(answer.usages, description),
    )


def cut_at_sentences(part: Stretch, text: str, words: Sequence[WordTime]) -> list[Said]:
    """What is said in a part, by sentences, and by `LONGEST_SEGMENT` in long ones; as a whole without times of words.

    Args:
        words: those of the text, with times from the beginning of the part.
    """
    if not words:
        return [Said(part.start, part.end, text.strip())]
    cutter = SentenceCutter()
    ends = list(itertools.accumulate(map(len, (*cutter.append(text), *cutter.flush()))))
    segments: list[Said] = []
    first = 0
    for index, word in enumerate(words, 1):
        following = words[index] if index < len(words) else None
        if following is not None:
            same_sentence = bisect(ends, word.place) == bisect(ends, following.place)
            if same_sentence and following.end - words[first].start <= LONGEST_SEGMENT:
                continue
        begin, end = words[first].place if first else 0, following.place if following is not None else len(text)
        segments.append(Said(part.start + words[first].start, part.start + word.end, text[begin:end].strip()))
        first = index
    return segments


def gap(before: str, after: str) -> str:
    """What stands between two texts: a space, unless the first ends with one or in a script that has none."""
    ends = not before or not after or before[-1].isspace() or unicodedata.east_asian_width(before[-1]) in "FW"
    return "" if ends else " "


def _whole(fields: TranscriptionForm, task: Task, transcript: Transcript) -> Response:
    text, segments = transcript.text, [segment for segment in transcript.segments if segment.text]
    match fields.response_format:
        case "text":
            return PlainTextResponse(f"{text}\n")
        case "srt":
            shown = enumerate(segments or transcript.segments, 1)
            cues = [f"{number}\n{_cue(segment, ',')}" for number, segment in shown]
            return PlainTextResponse("\n".join(cues), media_type="application/x-subrip")
        case "vtt":
            lines = ["WEBVTT\n", *(_cue(segment, ".") for segment in segments or transcript.segments)]
            return PlainTextResponse("\n".join(lines), media_type="text/vtt")
        case "verbose_json":
            return json_response(
                {
                    "task": task,
                    "language": "en" if task == "translate" else transcript.language or fields.language or "unknown",
                    "duration": round(transcript.seconds, 3),
                    "text": text,
                    "segments": [_segment(number, each, fields.temperature) for number, each in enumerate(segments)],
                    **({"words": [_word(each) for each in transcript.words]} if fields.timed else {}),
                    # Whole seconds, rounded up: LiteLLM refuses a fraction.
                    "usage": {"type": "duration", "seconds": math.ceil(transcript.seconds)},
                }
            )
        case "json":
            return json_response({"text": text, "usage": transcript.usage})


def _cue(segment: Said, point: str) -> str:
    """A subtitle; an empty line or an arrow in its text would end it."""
    line = " ".join(segment.text.split()).replace("-->", "→")
    return f"{_clock(segment.start, point)} --> {_clock(segment.end, point)}\n{line}\n"


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    clock = f"{milliseconds // 3_600_000:02}:{milliseconds // 60_000 % 60:02}:{milliseconds // 1000 % 60:02}"
    return f"{clock}{point}{milliseconds % 1000:03}"


def _segment(number: int, segment: Said, temperature: float) -> dict[str, Any]:
    """A segment of OpenAI's; what only Whisper knows is 0."""
    unknown: dict[str, Any] = {"avg_logprob": 0.0, "compression_ratio": 0.0, "no_speech_prob": 0.0, "tokens": []}
    place = {"id": number, "seek": 0, "start": round(segment.start, 3), "end": round(segment.end, 3)}
    return {**place, "text": segment.text, "temperature": temperature, **unknown}


def _word(said: Said) -> dict[str, Any]:
    return {"word": said.text, "start": round(said.start, 3), "end": round(said.end, 3)}


async def part_by_part(items: AsyncIterator[ChoiceItem], count: int) -> AsyncIterator[ChoiceItem]:
    """The items of `count` parts of a recording; those of later ones wait until the parts before are complete."""
    waiting: list[deque[ChoiceItem]] = [deque() for _ in range(count)]
    heard = 0
    async for found in items:
        waiting[found.choice].append(found)
        while heard < len(waiting) and waiting[heard]:
            ready = waiting[heard].popleft()
            heard += ready.item is None
            yield ready


async def _transcript_events(answer: Answer, description: Description) -> AsyncIterator[bytes]:
    """Stream OpenAI's transcript.text.delta and transcript.text.done events."""
    text, heard = "", 0
    async for part, item in part_by_part(answer.choices(), len(answer.usages)):
        if isinstance(item, Text) and item.text:
            delta = item.text if part == heard else gap(text, item.text) + item.text
            text, heard = text + delta, part
            yield event({"type": "transcript.text.delta", "delta": delta})
    yield event({"type": "transcript.text.done", "text": text, "usage": token_usage(answer.usages, description)})
    yield DONE_EVENT


def token_usage(usages: Sequence[Mapping[str, StageUsage]], description: Description) -> dict[str, Any]:
    """The usage of a transcription, whose parts are a request each, as OpenAI names it."""
    return {"type": "tokens", **token_counts(usage_of(usages, description, len(usages)))}
