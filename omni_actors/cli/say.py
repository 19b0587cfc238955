"""Has a running pipeline speak a text: `omni-actors say TEXT --save WAV [ENDPOINT]`.

It needs a speech model, which speaks the text that it is given; ask an omni model with `omni-actors chat --voice NAME`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from omni_actors import flags
from omni_actors.cli.connection import add_connection, connection, run
from omni_actors.client import Audio, OmniClient, spoken
from omni_actors.client.prompts import speech_ability
from omni_actors.errors import InvalidRequest
from omni_actors.launcher.one_request import save


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 if the text was spoken, 1 if not)."""
    return run(parser(), arguments, say_text)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = flags.CommandParser(
        prog="omni-actors say", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_connection(parser)
    parser.add_argument("text", type=flags.text, help="what to speak")
    parser.add_argument("--save", type=flags.path, metavar="WAV", required=True, help="write the sound here")
    parser.add_argument("--voice", type=flags.line, help="one of the model's voices")
    parser.add_argument("--language", type=flags.line, help="of the text (default: the model finds it out)")
    parser.add_argument("--instructions", type=flags.text, help="how to speak, in words")
    parser.add_argument("--clip", type=flags.path, metavar="FILE", help="a recording of the voice to speak with")
    parser.add_argument("--transcript", type=flags.text, metavar="TEXT", help="what is said in the recording")
    parser.add_argument("--seed", type=flags.seed, help="seed of sampling")
    parser.add_argument("--timeout", type=flags.seconds, help="seconds until all of it must be spoken")
    return parser


def say_text(options: argparse.Namespace) -> None:
    """Write the sound of a text to a file. Raises `InvalidRequest` if the pipeline does not speak what it is given."""
    pipeline = connection(options)
    pieces: list[NDArray[numpy.float32]] = []
    rate = 0
    with OmniClient(pipeline.endpoint, keys=pipeline.keys) as client:
        if speech_ability(client.describe()) is None:
            raise InvalidRequest(
                "This pipeline answers; it does not speak what it is given.", hint="Use omni-actors chat."
            )
        prompt = spoken(
            options.text,
            language=options.language,
            instructions=options.instructions,
            clip=options.clip,
            transcript=options.transcript,
        )
        for item in client.submit(prompt, voice=options.voice, seed=options.seed, timeout=options.timeout):
            if isinstance(item, Audio):
                pieces.append(item.samples)
                rate = item.sample_rate
    save(options.save.expanduser(), pieces, rate)
