"""A text that comes in parts or from another stage: which words go on when, and what the coordinator passes on."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from omni_actors.coordinator.core.instructions import Instruction, ToStage
from omni_actors.coordinator.core.replicas import Evidence
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import DType, Header, HostTensor
from omni_actors.protocol.messages import Failed, MoreText, OpenRequest
from omni_actors.protocol.payloads import EngineFacts, SpeechAbility, text_prompt
from omni_actors.stage.engine_interface import StageInputs, StreamEvent, TextEvent
from omni_actors.stage.outbound import divide
from omni_actors.stage.processors import ExtendText, InputPiece, Skip, Sound2Words, Start, Text2Speech, settled
from tests.support.builders import load, submit
from tests.support.requests import ALICE, BOB, NOW, bring_back, lose, ready

TEXT = " Hello there: you're 35. \n Cafe\u0301, 你好，世界。 Go on! \n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("Hel", ""),
        ("Hello", ""),
        ("Hello ", "Hello"),
        ("Hello, wor", "Hello,"[:-1]),
        ("Hello, world.", "Hello, world"),
        ("cafe\u0301", ""),
        ("cafe\u0301 ", ""),
        ("你好，世", "你好"),
        ("it's", "it"),
    ],
)
def test_a_word_is_settled_by_what_follows_it(text: str, words: str) -> None:
    assert text[: settled(text)] == words


def words_of(parts: list[tuple[str, int, bool]]) -> tuple[list[str], list[bool]]:
    """The pieces that a stage that speaks gets, and with which of them it learns that they are complete."""
    processor = Text2Speech(0, ("",))
    pieces, complete = [], []
    for part in parts:
        for action in processor.add(*part):
            match action:
                case Start(inputs=inputs):
                    assert not pieces
                    assert inputs.in_parts
                    pieces.append(inputs.prompt.only_text)
                    complete.append(inputs.complete)
                case ExtendText(text=text, complete=last):
                    pieces.append(text)
                    complete.append(last)
    return pieces, complete


def test_the_words_are_the_same_however_a_text_is_cut_and_what_comes_twice_is_left_out() -> None:
    generator = random.Random(1)
    for _ in range(200):
        cuts = sorted(generator.sample(range(len(TEXT)), generator.randrange(12)))
        parts = [(TEXT[a:b], a, False) for a, b in itertools.pairwise([0, *cuts, len(TEXT)])]
        parts.insert(generator.randrange(len(parts)) + 1, (TEXT[: parts[0][1] + len(parts[0][0])], 0, False))
        pieces, complete = words_of([*parts, ("", len(TEXT), True)])
        assert "".join(pieces) == TEXT.strip()
        assert complete == [False] * (len(complete) - 1) + [True]
    assert words_of([("Go.", 0, True)]) == (["Go."], [True])


def test_a_gap_is_an_error_and_a_text_without_words_says_nothing() -> None:
    processor = Text2Speech(0, ("chat",))
    with pytest.raises(InvalidPayload, match="from character 7 came where text from 0 was due"):
        processor.add("day", 7, False)
    with pytest.raises(InvalidPayload, match="must be a text"):
        processor.feed("chat", InputPiece(scalars={"text": 5}))
    assert processor.feed("chat", InputPiece(scalars={"text": " \n"})) == []
    assert processor.feed("chat", InputPiece(start=2, final=True)) == [Skip()]


def speaking(state: RequestMachine) -> RequestMachine:
    """Have the entry stage say that it takes text in parts."""
    for replica in state.replicas:
        if replica.stage == "prompt":
            replica.facts = EngineFacts(speech=SpeechAbility(text_in_parts=True))
    return state


def begin(state: RequestMachine, text: str = "", more_text: bool = True, **fields: object) -> list[Instruction]:
    body = submit(prompt=text_prompt(text), more_text=more_text, **fields)
    return state.submit(ALICE, Header("", "r1"), body, (), NOW)


def texts(instructions: list[Instruction]) -> list[tuple[str, int, str, bool | None]]:
    """What the entry stage gets: kind, first character, text, and whether that is all (of the announcement: not)."""
    found: list[tuple[str, int, str, bool | None]] = []
    for item in instructions:
        if isinstance(item, ToStage) and isinstance(item.body, MoreText):
            assert item.replica_id.stage == "prompt"
            found.append(("more", item.body.start, item.body.text, item.body.final))
        elif isinstance(item, ToStage) and isinstance(item.body, OpenRequest) and item.body.prompt is not None:
            assert item.replica_id.stage == "prompt"
            found.append(("open", 0, item.body.prompt.only_text or "", item.body.more_text))
        elif isinstance(item, ToStage) and isinstance(item.body, OpenRequest):
            assert item.body.more_text is None
    return found


def more(state: RequestMachine, text: str, start: int, final: bool = False, client: bytes = ALICE) -> list[Instruction]:
    return state.more_text(client, "r1", MoreText(text, start, final), NOW)


def test_text_goes_to_the_stage_that_speaks_and_all_of_it_to_the_one_that_takes_over() -> None:
    state = speaking(ready())
    assert texts(begin(state, "One ")) == [("open", 0, "One ", True)]
    assert texts(more(state, "two ", 4)) == [("more", 4, "two ", False)]
    assert texts(lose(state, "prompt", evidence=Evidence.NONE)) == []
    assert texts(more(state, "three.", 8)) == [], "it waits with the rest"
    assert texts(bring_back(state, "prompt")) == [("open", 0, "One two three.", True)]
    assert texts(more(state, "", 14, final=True)) == [("more", 14, "", True)]
    assert state.retained.used == len("One two three.")
    lose(state, "prompt", evidence=Evidence.NONE)
    assert texts(bring_back(state, "prompt")) == [("open", 0, "One two three.", False)]


@pytest.mark.parametrize(
    ("start", "client", "problem"), [(3, ALICE, "from character 3 came where 4"), (4, BOB, None), (4, ALICE, "")]
)
def test_only_text_that_follows_from_the_client_itself_is_taken(start: int, client: bytes, problem: str | None) -> None:
    state = speaking(ready())
    begin(state, "One ")
    instructions = more(state, "two", start, client=client)
    failures = [item.body for item in instructions if isinstance(getattr(item, "body", None), Failed)]
    if problem is None:
        assert instructions == []
    elif problem:
        assert problem in failures[0].message
    else:
        assert texts(instructions) == [("more", 4, "two", False)]


def test_after_the_end_nothing_more_is_taken_and_other_pipelines_take_no_parts() -> None:
    state = speaking(ready())
    begin(state, "One ")
    more(state, "", 4, final=True)
    assert any(isinstance(getattr(item, "body", None), Failed) for item in more(state, "two", 4))
    (refused,) = begin(ready())
    assert "takes no text in parts" in refused.body.message


WORDS = TextEvent("r1", "Good day.", [5, 6])
SOUND = HostTensor(DType.U8, (2,), b"ab")
PIECES = [
    ("thinker", InputPiece(scalars={"text": " The "})),
    ("prompt", InputPiece(token_ids=[1, 2], tensors={"vllm.0": SOUND}, final=True)),
    ("thinker", InputPiece(scalars={"text": "tide."}, start=5)),
    ("thinker", InputPiece(start=10, final=True)),
]


@pytest.mark.parametrize(
    ("pieces", "information", "text"),
    [
        (PIECES, {}, " The tide."),
        (PIECES, {"transcript": "A sea."}, "A sea."),
        ([PIECES[1], ("thinker", InputPiece(final=True))], {"transcript": "A sea."}, "A sea."),
        ([PIECES[1], ("thinker", InputPiece(final=True))], {}, None),  # nothing is said
        (PIECES, {"transcript": " "}, None),
    ],
)
def test_a_sound_and_its_text_come_together(
    pieces: list[tuple[str, InputPiece]], information: dict[str, str], text: str | None
) -> None:
    processor = Sound2Words(2, ("prompt", "thinker"))
    processor.information = information
    *early, last = [processor.feed(source, piece) for source, piece in pieces]
    assert not any(early)
    if text is None:
        assert last == [Skip()]
    else:
        assert last == [Start(StageInputs(tensors={"vllm.0": SOUND}, scalars={"text": text}))]


def test_a_gap_in_a_text_is_an_error_beside_a_sound_too() -> None:
    processor = Sound2Words(2, ("prompt", "thinker"))
    with pytest.raises(InvalidPayload, match="text from 7 came where text from 0 was due"):
        processor.feed("thinker", InputPiece(scalars={"text": "day"}, start=7))
    processor.information = {"transcript": 3}
    processor.feed("prompt", InputPiece(final=True))
    with pytest.raises(InvalidRequest, match="must be a text"):
        processor.feed("thinker", InputPiece(final=True))


def heard(source: str | list[str], **more: Any) -> dict[str, Any]:
    aligner = {"name": "aligner", "kind": "encoder", "model": "someone/two", "outputs": ["words"]}
    aligner |= {"inputs": {"from": source, "processor": "sound2words"}}
    stages = [
        {"name": "prompt", "kind": "prompt"},
        {"name": "thinker", "kind": "autoregressive", "inputs": {"from": "prompt"}, "outputs": ["text"]},
        {"name": "talker", "kind": "autoregressive", "inputs": {"from": "thinker"}, "outputs": ["audio"]},
    ]
    return {"name": "ears", "model": "someone/one", "stages": [*stages[: more.pop("stages", 2)], aligner | more]}


def speaking_stage(**fields: Any) -> dict[str, Any]:
    data, speaks = heard(["prompt", "thinker"]), {"from": "thinker", "processor": "text2speech"}
    data["stages"][2] = {"name": "talker", "kind": "autoregressive", "inputs": speaks, "outputs": ["audio"], **fields}
    return data


def test_an_aligner_has_a_checkpoint_of_its_own_and_takes_no_part_in_prompts(tmp_path: Path) -> None:
    for sources in (["prompt", "thinker"], "prompt"):
        pipeline = load(tmp_path, heard(sources)).pipeline
        assert pipeline.prompted("prompt") == ("thinker",)
        assert pipeline.route(["words"]) == ("prompt", *(["thinker"] if len(sources) == 2 else []), "aligner")
        assert pipeline.route(["text"]) == ("prompt", "thinker")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (heard(["prompt", "thinker"], kind="diffusion"), "a stage of kind diffusion takes none"),
        (heard(["prompt", "thinker", "talker"], stages=3), "'sound2words' takes one stage"),
        (heard(["prompt", "thinker"], stages=3), "it cannot send rows or tokens to ['talker']"),
        (speaking_stage(kind="diffusion"), "a stage of kind diffusion takes none"),
        (speaking_stage(inputs={"from": ["prompt", "thinker"], "processor": "text2speech"}), "takes one stage; here"),
        (speaking_stage(kind="prompt", inputs={"from": "thinker"}), "takes what clients send: it is the first"),
    ],
)
def test_what_cannot_be_aligned_or_spoken_is_a_wrong_configuration(
    tmp_path: Path, data: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, data)
    assert words in refused.value.message


def test_text_goes_to_the_client_and_to_the_next_stage_as_each_wants_it() -> None:
    piece = StreamEvent("r1", scalars={"text": "Good day."}, start=3)
    assert divide(WORDS, ["text"], 3, sends_text=True) == (WORDS, piece, len(WORDS.text))
    assert divide(WORDS, [], 3, sends_text=True) == (None, piece, len(WORDS.text))
    assert divide(WORDS, ["text"], 0, sends_text=False) == (WORDS, None, 0)
