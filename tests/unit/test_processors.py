"""Input processors: what the pieces of the source stages become."""

from __future__ import annotations

import array

import pytest

from omni_actors.errors import InvalidPayload
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.stage.processors import Extend, InputPiece, Passthrough, PicturesOnly, Skip, Start, Thinker2Talker


def rows(first: int, count: int, width: int = 2, dtype: DType = DType.F32) -> HostTensor:
    """Rows that carry their own position."""
    data = array.array("f", [float(i) for i in range(first, first + count) for _ in range(width)]).tobytes()
    return HostTensor(dtype, (count, width), data)


def positions(tensor: HostTensor) -> list[int]:
    values = array.array("f", bytes(tensor.data))
    width = tensor.shape[1]
    assert len(values) == tensor.shape[0] * width
    return [int(value) for value in values[::width]]


def thinker_piece(
    start: int, count: int, prompt: int | None = None, final: bool = False, **tensors: HostTensor
) -> InputPiece:
    scalars = {} if prompt is None else {"prompt_tokens": prompt}
    return InputPiece(tensors={"rows": rows(start, count), **tensors}, scalars=scalars, start=start, final=final)


def thinker2talker(start_after: int = 2) -> Thinker2Talker:
    return Thinker2Talker(start_after, ("thinker",))


def test_starts_after_two_steps_then_streams() -> None:
    processor = thinker2talker()
    mrope = HostTensor(DType.I64, (3, 3), bytes(72))
    assert processor.feed("thinker", thinker_piece(0, 3, prompt=3, mrope_positions=mrope)) == []
    (start,) = processor.feed("thinker", thinker_piece(3, 1))
    assert isinstance(start, Start)
    assert positions(start.inputs.tensors["prompt_rows"]) == [0, 1, 2, 3]
    assert set(start.inputs.tensors) == {"prompt_rows", "mrope_positions"}
    assert start.inputs.tensors["mrope_positions"] is mrope
    assert not start.inputs.complete
    (extend,) = processor.feed("thinker", thinker_piece(4, 1))
    assert isinstance(extend, Extend)
    assert positions(extend.rows) == [4]
    assert not extend.complete
    assert processor.feed("thinker", InputPiece(final=True, start=5)) == [Extend(None, True)]


def test_rows_that_come_again_are_dropped_by_position() -> None:
    processor = thinker2talker()
    processor.feed("thinker", thinker_piece(0, 3, prompt=3))
    (start,) = processor.feed("thinker", thinker_piece(1, 4))  # a preempted thinker computed rows 1 and 2 again
    assert positions(start.inputs.tensors["prompt_rows"]) == [0, 1, 2, 3]
    assert positions(start.inputs.tensors["reply_rows"]) == [4]
    assert processor.feed("thinker", thinker_piece(0, 5)) == []
    (extend,) = processor.feed("thinker", thinker_piece(3, 4))
    assert positions(extend.rows) == [5, 6]


@pytest.mark.parametrize(
    "pieces",
    [[thinker_piece(0, 3, 3), InputPiece(final=True)], [InputPiece(final=True)], [thinker_piece(0, 3, 3, final=True)]],
)
def test_an_empty_reply_has_no_speech(pieces: list[InputPiece]) -> None:
    processor = thinker2talker()
    actions = [action for piece in pieces for action in processor.feed("thinker", piece)]
    assert actions == [Skip()]


@pytest.mark.parametrize(
    "piece",
    [
        InputPiece(tensors={"rows": rows(0, 1)}, scalars={"prompt_tokens": -1}),
        InputPiece(tensors={"rows": rows(0, 1)}, scalars={"prompt_tokens": True}),
        InputPiece(tensors={"rows": rows(0, 1)}, scalars={"prompt_tokens": 1.5}),
        InputPiece(tensors={"rows": HostTensor(DType.F32, (), bytes(4))}, scalars={"prompt_tokens": 1}),
        InputPiece(tensors={"rows": HostTensor(DType.F32, (1, 1, 1), bytes(4))}, scalars={"prompt_tokens": 1}),
        thinker_piece(0, 2),
    ],
)
def test_pieces_that_do_not_fit(piece: InputPiece) -> None:
    with pytest.raises(InvalidPayload):
        thinker2talker().feed("thinker", piece)


def test_positions_may_come_as_token_ids_with_other_tensors_by_name() -> None:
    processor = thinker2talker(3)
    media = rows(0, 2)
    first = InputPiece(token_ids=[7, 8, 9], tensors={"media_rows": media}, scalars={"prompt_tokens": 2})
    assert processor.feed("thinker", first) == []
    (start,) = processor.feed("thinker", InputPiece(token_ids=[9, 10], start=2))  # token 9 comes again
    assert isinstance(start, Start)
    assert list(start.inputs.token_ids) == [7, 8, 9, 10]
    assert start.inputs.tensors == {"media_rows": media}
    assert start.inputs.scalars == {"prompt_tokens": 2}
    assert processor.feed("thinker", InputPiece(token_ids=[11, 12], start=4)) == [Extend(None, False, [11, 12])]
    assert processor.feed("thinker", InputPiece(token_ids=[12], start=5)) == []
    assert processor.feed("thinker", InputPiece(final=True, start=6)) == [Extend(None, True, ())]
    with pytest.raises(InvalidPayload, match="position 9 came where 6"):
        processor.feed("thinker", InputPiece(token_ids=[1], start=9))


def test_passthrough_joins_sources_in_the_order_of_the_configuration() -> None:
    processor = Passthrough(2, ("left", "right"))
    extra = HostTensor(DType.U8, (1,), b"x")
    assert processor.feed("right", InputPiece(token_ids=[3], start=0)) == []
    assert processor.feed("right", InputPiece(token_ids=[4], start=1, final=True, scalars={"n": 1})) == []
    assert processor.feed("left", InputPiece(token_ids=[1, 2], start=0)) == []
    (start,) = processor.feed("left", InputPiece(token_ids=[2], start=1, final=True, tensors={"extra": extra}))
    assert list(start.inputs.token_ids) == [1, 2, 3, 4]
    assert start.inputs.tensors == {"extra": extra}
    assert start.inputs.scalars == {"n": 1}
    assert start.inputs.complete


def test_a_stage_for_pictures_gets_them_alone_and_has_nothing_to_do_without() -> None:
    pixels = HostTensor(DType.U8, (1, 1, 4), b"rgba")
    processor = PicturesOnly(2, ("prompt",))
    assert processor.feed("prompt", InputPiece(token_ids=[1, 2], tensors={"picture_0": pixels, "vllm.0": pixels})) == []
    (start,) = processor.feed("prompt", InputPiece(start=2, final=True))
    assert start.inputs.token_ids == []
    assert start.inputs.tensors == {"picture_0": pixels}
    assert PicturesOnly(2, ("prompt",)).feed("prompt", InputPiece(token_ids=[1], final=True)) == [Skip()]
