"""Has a running pipeline speak a text: `omni-actors say TEXT --save WAV [ENDPOINT]`; `-` is the standard input.

A speech model speaks the text that it is given, and that of the standard input while it comes. An omni model is asked
to repeat it, which it nearly always does.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

from omni_actors import flags
from omni_actors.cli.connection import add_connection, connection, run
from omni_actors.client import OmniClient, spoken
from omni_actors.client.prompts import read_aloud, speech_ability
from omni_actors.client.sync_client import SyncRequestStream
from omni_actors.errors import InvalidRequest, OmniError
from omni_actors.launcher.one_request import save
from omni_actors.protocol.messages import Description

STDIN = "-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 if the text was spoken, 1 if not)."""
    return run(parser(), arguments, say_text)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = flags.CommandParser(
        prog="omni-actors say", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_connection(parser)
    parser.add_argument("text", type=flags.text, help="what to speak; - for the standard input")
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
    """Write the sound of a text to a file. Raises `InvalidRequest` for what the pipeline does not take."""
    with OmniClient(**connection(options)) as client:
        description = client.describe()
        in_parts = options.text == STDIN and description.speech is not None and description.speech.text_in_parts
        if options.text == STDIN:
            options.text = "" if in_parts else sys.stdin.read()
        prompt, modalities = _prompt(options, description)
        given = {name: getattr(options, name) for name in ("voice", "seed", "timeout")}
        stream = client.submit(prompt, modalities=modalities, more_text=in_parts, **given)
        if in_parts:
            threading.Thread(target=_read_on, args=(stream,), daemon=True).start()
        output = stream.result()
    save(options.save.expanduser(), output.audio, output.sample_rate)


def _read_on(stream: SyncRequestStream) -> None:
    """Send the standard input as it comes."""
    with contextlib.suppress(OmniError):  # the answer ends with it, too
        while text := sys.stdin.readline():
            stream.append_text(text)
        stream.end_text()


def _prompt(options: argparse.Namespace, description: Description) -> tuple[dict[str, Any] | str, list[str]]:
    """What to submit for the text, and the modalities to ask for."""
    if speech_ability(description) is not None:
        given = {name: getattr(options, name) for name in ("language", "instructions", "clip", "transcript")}
        return spoken(options.text, **given), ["audio"]
    if "audio" not in description.outputs:
        raise InvalidRequest("This pipeline does not speak.", hint="Its answers: omni-actors chat.")
    for name in ("language", "clip", "transcript"):
        if getattr(options, name) is not None:
            raise InvalidRequest(f"--{name} is for speech models; this pipeline's model answers.", field=name)
    return read_aloud(options.text, options.instructions), ["text", "audio"]
