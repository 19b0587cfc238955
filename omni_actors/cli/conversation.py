"""A conversation, without the terminal: what a line means, and what has been said. Looks at files, and reads none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_actors.errors import InvalidRequest, UnknownVoice, suggest
from omni_actors.host.paths import check_readable, expanded

OFF = "off"
COMMANDS = {
    "/voice": "[NAME|off]  speak the answers with this voice, or only write them; alone, list the voices",
    "/audio": "FILE        send a sound with the next message",
    "/image": "FILE        send a picture with the next message",
    "/save": "FILE        write the sound of the last answer as WAV",
    "/new": "            forget what was said and begin again",
    "/help": "            list the commands",
}
NEED_FILE = ("/audio", "/image", "/save")


@dataclass
class Conversation:
    """What was said, and how the next answer is wanted.

    Args:
        voices: those that the pipeline has; none if it does not speak.
        speaks: whether answers are wanted as sound, too.
        voice: the wanted one; `None` for the pipeline's own choice.
        system: the system message, "" for none.
    """

    voices: Sequence[str] = ()
    speaks: bool = False
    voice: str | None = None
    system: str = ""
    said: list[dict[str, Any]] = field(default_factory=list)
    attached: list[dict[str, Any]] = field(default_factory=list)

    def question(self, text: str) -> dict[str, Any]:
        """The user's next message: what is attached, then the text."""
        parts = [*self.attached, *([{"type": "text", "text": text}] if text else [])]
        return {"role": "user", "content": parts if self.attached else text}

    def messages(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        """All messages, for a request."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.said, question]

    def answered(self, question: dict[str, Any], answer: str) -> None:
        """Remember a question with its answer, as far as there is one."""
        self.attached.clear()
        self.said += [question, *([{"role": "assistant", "content": answer}] if answer else [])]

    def restart(self) -> None:
        """Forget what was said and attached."""
        self.said.clear()
        self.attached.clear()

    def attach(self, kind: str, name: str) -> Path:
        """Send a file with the next message. Raises `ConfigError` if it cannot be read."""
        path = expanded(name, f"/{kind}")
        check_readable(path, f"/{kind}")
        self.attached.append({"type": kind, kind: path})
        return path

    def choose(self, voice: str) -> str:
        """Take a voice, or none for "off"; returns what holds now. Raises `UnknownVoice`."""
        if voice == OFF:
            self.speaks = False
            return "answers are text only"
        if not self.voices:
            raise UnknownVoice("This pipeline does not speak.", hint="")
        if voice and voice not in self.voices:
            raise UnknownVoice(
                f"There is no voice {voice!r}.{suggest(voice, self.voices)}", hint=f"Take {', '.join(self.voices)}."
            )
        if voice:
            self.speaks, self.voice = True, voice
        now = (self.voice or "the pipeline's own") if self.speaks else OFF
        return f"voice: {now} (there are {', '.join(self.voices)})"


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
    return "\n".join([*lines, "Ctrl-C  cancels the answer; Ctrl-D ends"])
