"""Stages that take the text of another: alone, or beside a sound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.stage.engine_interface import StageInputs, StreamEvent, TextEvent
from omni_actors.stage.outbound import divide
from omni_actors.stage.processors import InputPiece, Skip, Sound2Words, Start
from tests.support.builders import load

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
    ],
)
def test_what_cannot_be_aligned_is_a_wrong_configuration(tmp_path: Path, data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, data)
    assert words in refused.value.message


def test_text_goes_to_the_client_and_to_the_next_stage_as_each_wants_it() -> None:
    piece = StreamEvent("r1", scalars={"text": "Good day."}, start=3)
    assert divide(WORDS, ["text"], 3, sends_text=True) == (WORDS, piece, len(WORDS.text))
    assert divide(WORDS, [], 3, sends_text=True) == (None, piece, len(WORDS.text))
    assert divide(WORDS, ["text"], 0, sends_text=False) == (WORDS, None, 0)


SPEAKER = {"name": "talker", "kind": "autoregressive", "inputs": {"from": "thinker", "processor": "text2speech"}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kind": "diffusion"}, "a stage of kind diffusion takes none"),
        ({"inputs": {"from": ["prompt", "thinker"], "processor": "text2speech"}}, "takes one stage; here"),
        ({"kind": "prompt", "inputs": {"from": "thinker"}}, "takes what clients send: it is the first"),
    ],
)
def test_a_stage_that_cannot_speak_a_text_is_a_wrong_configuration(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    data = heard(["prompt", "thinker"])
    data["stages"][2] = {**SPEAKER, "outputs": ["audio"], **change}
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, data)
    assert problem in refused.value.message
