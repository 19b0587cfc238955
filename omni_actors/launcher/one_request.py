"""Answers one request for `launch --prompt`: text to stdout as it arrives, audio to a file."""

from __future__ import annotations

import argparse
from pathlib import Path

import soundfile

from omni_actors.client import AsyncOmniClient, Audio, Text
from omni_actors.errors import StartupError
from omni_actors.logs import say
from omni_actors.processes import EXIT_OK


async def answer(endpoint: str, keys: str | None, options: argparse.Namespace) -> int:
    """Send one request and write its answer; returns the exit code. Raises what the request failed with."""
    pieces = []
    rate = 0
    async with AsyncOmniClient(endpoint, keys=keys) as client:
        stream = await client.submit(
            options.prompt,
            modalities=needed_modalities(options),
            voice=options.voice,
            seed=options.seed,
            audios=[Path(name) for name in options.audio],
            images=[Path(name) for name in options.image],
            timeout=options.timeout,
        )
        async for event in stream:
            if isinstance(event, Text):
                print(event.text, end="", flush=True)
            elif isinstance(event, Audio):
                pieces.append(event.samples)
                rate = event.sample_rate
    print(flush=True)
    if options.save_audio:
        if not pieces:
            raise StartupError("The answer has no audio to save.", hint="Add --modalities text,audio.")
        with soundfile.SoundFile(options.save_audio, "w", rate, 1, format="WAV", subtype="PCM_16") as file:
            for piece in pieces:
                file.write(piece)
        seconds = sum(len(piece) for piece in pieces) / rate
        say(f"wrote {seconds:.2f} s of audio to {options.save_audio}")
    return EXIT_OK


def needed_modalities(options: argparse.Namespace) -> list[str] | None:
    """The modalities to request: those given, else text alone unless audio is to be saved; `None` for all."""
    if options.modalities:
        given: str = options.modalities
        return given.split(",")
    return None if options.save_audio else ["text"]
