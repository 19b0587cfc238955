"""Talks to a running pipeline in the terminal: `omni-actors chat [ENDPOINT]`.

Lines are messages, and the pipeline answers each with all that was said before in mind. Ctrl-C cancels an answer,
Ctrl-D ends. Sound goes to the speaker if the package sounddevice is installed; `/save FILE` writes it anywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from omni_actors import flags
from omni_actors.cli.connection import add_connection, connection, with_flag
from omni_actors.cli.conversation import Conversation, command_of, help_text
from omni_actors.cli.speaker import Speaker, find_speaker
from omni_actors.client import Audio, OmniClient, SyncRequestStream, Text
from omni_actors.errors import Aborted, InvalidRequest, OmniError
from omni_actors.host.paths import expanded
from omni_actors.host.processes import EXIT_FAILED, EXIT_OK
from omni_actors.launcher.one_request import save
from omni_actors.logs import say

TEXT, AUDIO = "text", "audio"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 at the end of the input, 1 if no pipeline answers)."""
    options = parser().parse_args(with_flag(sys.argv[1:] if arguments is None else arguments))
    try:
        pipeline = connection(options)
        with OmniClient(pipeline.endpoint, keys=pipeline.keys) as client:
            Chat(client, options).run()
    except OmniError as error:
        print(f"error ({error.code.value}): {error}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_OK


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = flags.CommandParser(
        prog="omni-actors chat",
        usage="omni-actors chat [ENDPOINT] [--voice NAME] [--system TEXT]",
        description=f"{__doc__}\n{help_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_connection(parser)
    parser.add_argument("--voice", type=flags.line, help="speak answers with this voice; off: only text")
    parser.add_argument("--system", type=flags.text, default="", help="a system message, before everything else")
    parser.add_argument("--seed", type=flags.seed, help="seed of sampling and of the vocoder's noise")
    parser.add_argument("--timeout", type=flags.seconds, help="seconds for each answer")
    return parser


class Chat:
    """Reads lines, prints answers, and remembers the sound of the last one."""

    def __init__(self, client: OmniClient, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        offered = client.describe()
        self._offered = offered.modalities
        self._speaker: Speaker | None = find_speaker() if AUDIO in offered.modalities else None
        voices = offered.voices if AUDIO in offered.modalities else ()
        self._conversation = Conversation(voices, self._speaker is not None, system=options.system)
        self._pieces: list[NDArray[numpy.float32]] = []
        self._rate = 0
        if options.voice:
            self._conversation.choose(options.voice)
        if sys.stdin.isatty():
            import readline  # noqa: F401 - `input` edits lines with it

            sound = "" if self._speaker is not None or not voices else " No speaker: /voice and /save give sound."
            say(f"{offered.pipeline}: /help lists the commands, Ctrl-D ends.{sound}")

    def run(self) -> None:
        """Answer every line until the input ends."""
        while True:
            try:
                self._take(input("> " if sys.stdin.isatty() else "").rstrip())
            except EOFError:
                return
            except KeyboardInterrupt:  # not within an answer: forget the line
                print()
            except OmniError as error:
                say(f"error: {error}")

    def _take(self, line: str) -> None:
        match command_of(line):
            case None:
                if line.strip() or self._conversation.attached:
                    self._answer(line.strip())
            case ("/voice", name):
                say(self._conversation.choose(name))
            case ("/save", name):
                if not self._pieces:
                    raise InvalidRequest("The last answer had no sound.", hint="Choose a /voice, then ask again.")
                save(expanded(name, "/save"), self._pieces, self._rate)
            case ("/new", _):
                self._conversation.restart()
                say("forgotten")
            case ("/help", _):
                print(help_text())
            case (command, name):
                path = self._conversation.attach(command[1:], name)
                say(f"{path.name} goes with the next message")

    def _answer(self, text: str) -> None:
        conversation = self._conversation
        question = conversation.question(text)
        wanted = (TEXT, AUDIO) if conversation.speaks else (TEXT,)
        self._pieces = []
        words: list[str] = []
        stream: SyncRequestStream | None = None
        try:
            stream = self._client.submit(
                conversation.messages(question),
                modalities=[modality for modality in wanted if modality in self._offered],
                voice=conversation.voice if conversation.speaks else None,
                seed=self._options.seed,
                timeout=self._options.timeout,
            )
            for item in stream:
                if isinstance(item, Text):
                    words.append(item.text)
                    print(item.text, end="", flush=True)
                elif isinstance(item, Audio):
                    self._pieces.append(item.samples)
                    self._rate = item.sample_rate
                    if self._speaker is not None:
                        self._speaker.play(item.samples, item.sample_rate)
            print()
        except (KeyboardInterrupt, Aborted):
            if stream is not None:  # else the client has taken its message back
                stream.abort()
            if self._speaker is not None:
                self._speaker.stop()
            print()
            say("cancelled")
        except OmniError:
            print()
            raise
        conversation.answered(question, "".join(words))


if __name__ == "__main__":
    sys.exit(main())
