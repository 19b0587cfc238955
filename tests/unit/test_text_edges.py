"""The text of a stage as the prompt of a later one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_actors.engine.prompt import instructed
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import DType, TensorRef, pack_token_ids
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt
from omni_actors.stage.engine_interface import StreamEvent, TextEvent
from omni_actors.stage.outbound import divide
from omni_actors.stage.processors import InputPiece, Text2Prompt
from tests.support.builders import load

LISTENER, PROMPT, CHAT = 1, 2, 3
WORDS = TextEvent("r1", "Good day.", [5, 6])


def cascade() -> dict[str, Any]:
    return {
        "name": "two",
        "model": "someone/one",
        "stages": [
            {"name": "prompt", "kind": "prompt", "instruction": "Write: "},
            {"name": "listener", "kind": "autoregressive", "inputs": {"from": "prompt"}},
            {"name": "again", "kind": "prompt", "inputs": {"from": "listener", "processor": "text2prompt"}},
            {"name": "chat", "kind": "autoregressive", "inputs": {"from": "again"}, "outputs": ["text"]},
        ],
    }


def user(*parts: ContentPart, role: str = "user") -> ChatMessage:
    return ChatMessage(role=role, content=parts)


def test_missing_text_is_an_error() -> None:
    processor = Text2Prompt(2, ("listener",))
    with pytest.raises(InvalidPayload, match="text from character 7 came where text from 0 was due"):
        processor.feed("listener", InputPiece(scalars={"text": "day"}, start=7))
    processor.feed("listener", InputPiece(scalars={"text": " \n"}))
    with pytest.raises(InvalidRequest, match="'listener' wrote no text"):
        processor.feed("listener", InputPiece(start=2, final=True))


def test_text_goes_to_the_client_and_to_the_next_stage_as_each_wants_it() -> None:
    piece = StreamEvent("r1", scalars={"text": "Good day."}, start=3)
    assert divide(WORDS, ["text"], 3, sends_text=True) == (WORDS, piece, len(WORDS.text))
    assert divide(WORDS, [], 3, sends_text=True) == (None, piece, len(WORDS.text))
    assert divide(WORDS, ["text"], 0, sends_text=False) == (WORDS, None, 0)


def test_an_instruction_stands_before_text_and_media() -> None:
    sound = Media("audio", MediaEncoding.FILE, TensorRef(DType.U8, (4,), 0))
    (message,) = instructed(Prompt(messages=(user(ContentPart(media=0)),), media=(sound,)), "Write: ").messages
    assert message.content == (ContentPart(text="Write: "), ContentPart(media=0))
    (message,) = instructed(Prompt(messages=(user(ContentPart(text="hello")),)), "Write: ").messages
    assert message.content == (ContentPart(text="Write: hello"),)


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(messages=(user(ContentPart(text="Be brief."), role="system"), user(ContentPart(text="hello")))),
        Prompt(messages=(user(ContentPart(text="hello"), role="assistant"),)),
        Prompt(token_ids=pack_token_ids([1, 2])),
    ],
)
def test_what_later_models_would_not_see_is_refused(prompt: Prompt) -> None:
    assert instructed(prompt, "") is prompt
    with pytest.raises(InvalidRequest, match="one message of the user at a time") as raised:
        instructed(prompt, "Write: ")
    assert raised.value.field == "messages"


@pytest.mark.parametrize(
    ("stage", "change", "problem"),
    [
        (CHAT, {"instruction": "Say: "}, r"stages\.chat\.instruction is for stages of kind prompt"),
        (PROMPT, {"inputs": {"from": "listener"}}, "processor must be 'text2prompt' for a prompt stage after another"),
        (
            CHAT,
            {"inputs": {"from": "again", "processor": "text2prompt"}},
            r"stages\.chat\..*of kind autoregressive takes none",
        ),
        (PROMPT, {"inputs": {"from": ["listener", "prompt"], "processor": "text2prompt"}}, "takes one stage; here"),
        (CHAT, {"inputs": {"from": ["again", "listener"]}}, r"cannot send rows or tokens to \['chat'\]"),
    ],
)
def test_a_cascade_that_cannot_work_is_refused(
    tmp_path: Path, stage: int, change: dict[str, Any], problem: str
) -> None:
    data = cascade()
    load(tmp_path, data)
    data["stages"][stage] |= change
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, data)
