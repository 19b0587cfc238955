"""Answers one request for `launch --prompt`: text to stdout as it arrives, sound and pictures to files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy
import soundfile
from numpy.typing import NDArray

from omni_actors.client import AsyncOmniClient, Progress, Text
from omni_actors.client.streams import CollectedItems
from omni_actors.errors import StartupError
from omni_actors.host.processes import EXIT_OK
from omni_actors.http_server.images import ImageFormat, encoded_image
from omni_actors.logs import redraw, say

IMAGE_SUFFIXES: dict[str, ImageFormat] = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


async def answer(endpoint: str, keys: str | None, options: argparse.Namespace) -> int:
    """Send one request and write its answer; returns the exit code. Raises what the request failed with."""
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
        collected = CollectedItems(stream.request_id)
        async for item in stream:
            collected.add(item)
            if isinstance(item, Text):
                print(item.text, end="", flush=True)
            elif isinstance(item, Progress):
                redraw(f"step {item.step} of {item.steps}")
    redraw("")
    print(flush=True)
    output = collected.joined()
    if options.save_audio is not None:
        save(options.save_audio.expanduser(), output.audio, output.sample_rate)
    if options.save_image is not None:
        save_picture(options.save_image.expanduser(), output.images)
    return EXIT_OK


def save(path: Path, samples: NDArray[numpy.float32] | None, rate: int) -> None:
    """Write sound to a WAV file. Raises `StartupError` if there is none or it cannot be written."""
    if samples is None:
        raise StartupError("The answer has no audio to save.", hint="Add --modalities text,audio.")
    try:
        soundfile.write(path, samples, rate, subtype="PCM_16", format="WAV")
    except (OSError, soundfile.SoundFileError) as error:  # a full disk, for instance
        raise StartupError(f"Cannot write {path}: {error}.", hint="The answer's text is above.") from error
    say(f"wrote {len(samples) / rate:.2f} s of audio to {path}")


def save_picture(path: Path, pictures: Sequence[NDArray[numpy.uint8]]) -> None:
    """Write the last picture to a file. Raises `StartupError` if there is none or it cannot be written."""
    if not pictures:
        raise StartupError("The answer has no picture to save.", hint="Add --modalities image.")
    height, width, _ = pictures[-1].shape
    try:
        path.write_bytes(encoded_image(pictures[-1], IMAGE_SUFFIXES[path.suffix.lower()]))
    except OSError as error:
        raise StartupError(f"Cannot write {path}: {error.strerror}.") from error
    say(f"wrote a picture of {width} x {height} pixels to {path}")


def needed_modalities(options: argparse.Namespace) -> list[str] | None:
    """The modalities to request: those given, else those to be saved, else text alone; `None` for all."""
    if options.modalities:
        given: str = options.modalities
        return [modality.strip() for modality in given.split(",")]
    if options.save_audio is not None:
        return None
    return ["image"] if options.save_image is not None else ["text"]
