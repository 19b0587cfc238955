"""The routes below /v1/audio/voices: voices that clients make of recordings."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Literal

import numpy
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from omni_actors.client.prompts import speech_ability
from omni_actors.http_server.bodies import ANY, Form, FormBody, Strict
from omni_actors.http_server.errors import bad_field
from omni_actors.http_server.generation import VoiceId
from omni_actors.http_server.state import ID, ServerState, Voice, json_response, no_voice

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


VOICE_BODY = FormBody(VoiceForm, {"consent": ANY}, {SAMPLE: 1}, SAMPLE)


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
    samples = await state.media.samples(form.files[0].data, SAMPLE, rate, ability.max_clip_seconds)
    if len(samples) < ability.min_clip_seconds * rate:
        seconds = f"{len(samples) / rate:.2f} s; it takes {ability.min_clip_seconds:g} s to know a voice."
        raise bad_field(SAMPLE, f"The recording lasts {seconds}")
    if loudest(samples, rate) < QUIET:
        raise bad_field(SAMPLE, "The recording is silent, or nearly so: record the voice louder.")
    voice = Voice(name, int(time.time()), rate, len(samples), form.fields.transcript)
    await asyncio.to_thread(state.voices.add, voice, samples)
    return json_response(_shown(voice))


async def voice(request: Request, state: ServerState, name: str) -> Response:
    """A voice that a client has made, by its name or id."""
    found = await asyncio.to_thread(state.voices.find, name)
    if found is None:
        raise no_voice(name)
    return json_response(_shown(found))


async def delete(request: Request, state: ServerState, name: str) -> Response:
    """Delete a voice that a client has made. Requests that speak with it already go on."""
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
