"""Talks to a running pipeline in the terminal, or has it speak a text: `omni-actors chat` and `omni-actors say`.

Lines are messages, and the pipeline answers each with all that was said before in mind. Ctrl-C cancels an answer,
Ctrl-D ends. Sound goes to the speaker if the package sounddevice is installed; `/save FILE` writes it anywhere.
"""

from __future__ import annotations

import argparse
import importlib
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from omni_actors import flags
from omni_actors.cli.connection import add_connection, connection, run
from omni_actors.client import Audio, OmniClient, SyncRequestStream, Text
from omni_actors.client.streams import CollectedItems
from omni_actors.errors import Aborted, InvalidRequest, OmniError, UnknownVoice, suggest
from omni_actors.host.run_directory import check_readable, expanded
from omni_actors.launcher.one_request import save
from omni_actors.logs import get_logger, say

logger = get_logger(__name__)

PIECES_PER_SECOND = 10


class Speaker:
    """Plays in a thread of its own, so that text need not wait for sound.

    Args:
        device: the module `sounddevice`.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._pieces: queue.SimpleQueue[tuple[int, NDArray[numpy.float32], int]] = queue.SimpleQueue()
        self._answer = 0  # pieces of earlier answers are not played any more
        threading.Thread(target=self._play_all, name="speaker", daemon=True).start()

    def play(self, samples: NDArray[numpy.float32], rate: int) -> None:
        """Play after all that was given since the last `stop`."""
        self._pieces.put((self._answer, samples, rate))

    def stop(self) -> None:
        """Be silent within a tenth of a second, and forget what has not been played."""
        self._answer += 1

    def _play_all(self) -> None:
        stream, of_rate = None, 0
        while True:
            answer, samples, rate = self._pieces.get()
            step = max(1, rate // PIECES_PER_SECOND)
            try:
                for begin in range(0, len(samples), step):
                    if answer != self._answer:
                        break
                    if stream is None or rate != of_rate:
                        stream, of_rate = self._device.OutputStream(samplerate=rate, channels=1, dtype="float32"), rate
                        stream.start()
                    stream.write(samples[begin : begin + step].reshape(-1, 1))
            except self._device.PortAudioError as error:  # unplugged, for instance; the text goes on
                logger.warning("cannot play: %s", error)
                stream = None


def find_speaker() -> Speaker | None:
    """Return the speaker of this host; `None` where there is none, or `sounddevice` is not installed."""
    try:
        device = importlib.import_module("sounddevice")
    except (ImportError, OSError):  # not installed, or without PortAudio
        return None
    try:
        device.query_devices(kind="output")
    except device.PortAudioError:
        return None
    return Speaker(device)


OFF, TEXT, AUDIO = "off", "text", "audio"
COMMANDS = {
    "/voice": "[NAME|off]  speak the answers with this voice, or only write them; alone, list the voices",
    "/audio": "FILE        send a sound with the next message",
    "/image": "FILE        send a picture with the next message",
    "/save": "FILE        write the sound of the last answer as WAV",
    "/new": "            forget what was said and begin again",
    "/quit": "            end",
    "/help": "            list the commands",
}
NEED_FILE = ("/audio", "/image", "/save")


def command_of(line: str) -> tuple[str, str] | None:
    """Split a line that begins with a slash into command and argument; `None` for a message.

    Raises:
        InvalidRequest: there is no such command, or it lacks its file.
    """
    if not line.startswith("/"):
        return None
    command, _, argument = line.partition(" ")
    if command not in COMMANDS:
        raise InvalidRequest(
            f"There is no command {command!r}.{suggest(command, COMMANDS)}",
            hint="Put a space first to send a text that begins with a slash.",
        )
    if command in NEED_FILE and not argument.strip():
        raise InvalidRequest(f"{command} needs the name of a file.", hint="")
    return command, argument.strip()


def help_text() -> str:
    """The commands, one line each."""
    lines = [f"{name:<7} {about}" for name, about in COMMANDS.items()]
    return "\n".join([*lines, "Ctrl-C  cancels the answer; Ctrl-D ends, as /quit does"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (0 at the end of the input, 1 if no pipeline answers)."""
    return run(parser(), arguments, _chat)


def _chat(options: argparse.Namespace) -> None:
    with OmniClient(**connection(options)) as client:
        Chat(client, options).run()


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
    """Reads lines, prints answers, and remembers what was said and the sound of the last answer."""

    def __init__(self, client: OmniClient, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        offered = client.describe()
        self._offered = offered.modalities
        self._voices = offered.voices if AUDIO in offered.modalities else ()
        self._speaker = find_speaker() if AUDIO in offered.modalities else None
        self._speaks = self._speaker is not None  # whether answers are wanted as sound, too
        self._voice: str | None = None  # the pipeline's own choice
        self._system = [{"role": "system", "content": options.system}] if options.system else []
        self._said: list[dict[str, Any]] = []
        self._attached: list[dict[str, Any]] = []  # goes with the next message
        self._heard: tuple[NDArray[numpy.float32] | None, int] = None, 0  # the sound of the last answer, and its rate
        if options.voice:
            self._choose(options.voice)
        if sys.stdin.isatty():
            import readline  # noqa: F401 - `input` edits lines with it

            sound = "" if self._speaker is not None or not self._voices else " No speaker: /voice and /save give sound."
            say(f"{offered.pipeline}: /help lists the commands, /quit ends.{sound}")

    def run(self) -> None:
        """Answer every line until the input ends, or /quit."""
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
                if line.strip() or self._attached:
                    self._answer(line.strip())
            case ("/voice", name):
                self._choose(name)
                now = (self._voice or "the pipeline's own") if self._speaks else OFF
                say("answers are text only" if name == OFF else f"voice: {now} (there are {', '.join(self._voices)})")
            case ("/save", name):
                if self._heard[0] is None:
                    raise InvalidRequest("The last answer had no sound.", hint="Choose a /voice, then ask again.")
                save(expanded(name, "/save"), *self._heard)
            case ("/new", _):
                self._said.clear()
                self._attached.clear()
                say("forgotten")
            case ("/quit", _):
                raise EOFError
            case ("/help", _):
                print(help_text())
            case (command, name):
                path, kind = expanded(name, command), command[1:]
                check_readable(path, command)
                self._attached.append({"type": kind, kind: path})
                say(f"{path.name} goes with the next message")

    def _choose(self, voice: str) -> None:
        """Take a voice, or none for "off"; keep what holds for "". Raises `UnknownVoice`."""
        if voice == OFF:
            self._speaks = False
        elif not self._voices:
            raise UnknownVoice("This pipeline does not speak.", hint="")
        elif voice and voice not in self._voices:
            raise UnknownVoice(
                f"There is no voice {voice!r}.{suggest(voice, self._voices)}", hint=f"Take {', '.join(self._voices)}."
            )
        elif voice:
            self._speaks, self._voice = True, voice

    def _answer(self, text: str) -> None:
        parts = [*self._attached, *([{"type": "text", "text": text}] if text else [])]
        question = {"role": "user", "content": parts if self._attached else text}
        wanted = (TEXT, AUDIO) if self._speaks else (TEXT,)
        collected = CollectedItems("")
        stream: SyncRequestStream | None = None
        try:
            stream = self._client.submit(
                [*self._system, *self._said, question],
                modalities=[modality for modality in wanted if modality in self._offered],
                voice=self._voice if self._speaks else None,
                seed=self._options.seed,
                timeout=self._options.timeout,
            )
            for item in stream:
                collected.add(item)
                if isinstance(item, Text):
                    print(item.text, end="", flush=True)
                elif isinstance(item, Audio) and self._speaker is not None:
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
        finally:
            answer = collected.joined()
            self._heard = answer.audio, answer.sample_rate
        self._attached.clear()
        self._said += [question, *([{"role": "assistant", "content": answer.text}] if answer.text else [])]
