"""Answers one request for `launch --prompt`: text to stdout as it arrives, audio to a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy
import soundfile
from numpy.typing import NDArray

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.errors import StartupError
from omni_actors.logs import say
from omni_actors.processes import EXIT_OK


async def answer(endpoint: str, keys: str | None, options: argparse.Namespace) -> int:
    """Send one request and write its answer; returns the exit code. Raises what the request failed with."""
    pieces: list[NDArray[numpy.float32]] = []
    rate = 0
    async with AsyncOmniClient(endpoint, keys=keys) as client:
        stream = await client.submit(
            options.prompt,
            modalities=needed_modalities(options),
            voice=options.voice,
            seed=options.seed,
            audios=[path.expanduser() for path in options.audio],
            images=[path.expanduser() for path in options.image],
            timeout=options.timeout,
        )
        async for event in stream:
            if isinstance(event, Text):
                print(event.text, end="", flush=True)
            elif isinstance(event, Audio):
                pieces.append(event.samples)
                rate = event.sample_rate
    print(flush=True)
    if options.save_audio is not None:
        save(options.save_audio.expanduser(), pieces, rate)
    return EXIT_OK


def save(path: Path, pieces: Sequence[NDArray[numpy.float32]], rate: int) -> None:
    """Write sound to a WAV file. Raises `StartupError` if there is none or it cannot be written."""
    if not pieces:
        raise StartupError("The answer has no audio to save.", hint="Add --modalities text,audio.")
    try:
        with soundfile.SoundFile(path, "w", rate, 1, format="WAV", subtype="PCM_16") as file:
            for piece in pieces:
                file.write(piece)
    except (OSError, soundfile.SoundFileError) as error:  # a full disk, for instance
        raise StartupError(f"Cannot write {path}: {error}.", hint="The answer's text is above.") from error
    say(f"wrote {sum(map(len, pieces)) / rate:.2f} s of audio to {path}")


def needed_modalities(options: argparse.Namespace) -> list[str] | None:
    """The modalities to request: those given, else text alone unless audio is to be saved; `None` for all."""
    if options.modalities:
        given: str = options.modalities
        return [modality.strip() for modality in given.split(",")]
    return None if options.save_audio is not None else ["text"]
