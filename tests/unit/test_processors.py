"""Input processors: what the pieces of the source stages become. Pictures on their way from an engine to the client."""

from __future__ import annotations

import array

import pytest

from omni_actors.config import Modality, StageConfig, StageKind
from omni_actors.config.schema import InputConfig
from omni_actors.errors import ErrorCode, InvalidPayload
from omni_actors.protocol.fields import DType, HostTensor, ReplicaId, TensorRef
from omni_actors.protocol.messages import LATENTS, PIXELS, Chunk, FinishReason, ImageChunk, VideoChunk
from omni_actors.stage.engine_interface import FinishedEvent, ImageEvent, ProgressEvent, VideoEvent
from omni_actors.stage.meter import StageMeter
from omni_actors.stage.processors import Extend, InputPiece, Latents2Image, PicturesOnly, Skip, Start, Thinker2Talker
from omni_actors.telemetry import metrics as table
from tests.support.builders import done
from tests.support.requests import ALICE, again, ask, bring_back, failure, lose, ready, say
from tests.support.stage import ROUTE, StageUnderTest


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


def test_a_stage_for_pictures_gets_them_alone_and_has_nothing_to_do_without() -> None:
    pixels = HostTensor(DType.U8, (1, 1, 4), b"rgba")
    processor = PicturesOnly(2, ("prompt",))
    assert processor.feed("prompt", InputPiece(token_ids=[1, 2], tensors={"picture_0": pixels, "vllm.0": pixels})) == []
    (start,) = processor.feed("prompt", InputPiece(start=2, final=True))
    assert start.inputs.token_ids == []
    assert start.inputs.tensors == {"picture_0": pixels}
    assert PicturesOnly(2, ("prompt",)).feed("prompt", InputPiece(token_ids=[1], final=True)) == [Skip()]


RED = HostTensor(DType.U8, (1, 2, 3), bytes([255, 0, 0] * 2))
FRAME = HostTensor(DType.U8, (1, 1, 2, 3), RED.data)
NOISE = HostTensor(DType.F32, (4, 2), bytes(32))
FINISHED = FinishedEvent("r1", FinishReason.STOP, 1, 8)


def stage_of(*outputs: Modality, meter: StageMeter | None = None) -> StageUnderTest:
    """The third stage of four, with these outputs."""
    inputs = InputConfig(sources="thinker")
    config = StageConfig(name="talker", kind=StageKind.ECHO, inputs=inputs, outputs=list(outputs))
    stage = StageUnderTest("talker", stage=config, meter=meter)
    stage.expect()
    stage.tokens("x")
    return stage


def test_pictures_go_to_the_client_where_they_are_an_output_and_to_later_stages_without_previews() -> None:
    meter = StageMeter(ReplicaId("talker", 0, 5))
    stage = stage_of(Modality.IMAGE, meter=meter)
    preview, to_client, to_next = stage.do(ImageEvent("r1", RED, preview=True), ImageEvent("r1", RED))
    assert preview.body.preview
    assert preview.destination is None
    assert not to_client.body.preview
    assert bytes(to_client.buffers[0]) == RED.data
    assert to_next.destination == ROUTE[3]
    assert list(to_next.body.tensors) == [PIXELS]
    assert not to_next.body.final
    assert meter.meters.values[(table.STAGE_PICTURES.name, meter.labels)] == 1
    end, _ = stage.do(FINISHED)
    assert end.body == Chunk(start=1, final=True)


def test_videos_and_progress_go_to_the_client_alone_and_progress_is_no_output() -> None:
    meter = StageMeter(ReplicaId("talker", 0, 5))
    stage = stage_of(Modality.VIDEO, meter=meter)
    (progress,) = stage.do(ProgressEvent("r1", 3, 8))
    assert sum(meter.meters.histogram(table.OUTPUT_SECONDS, *meter.labels).counts) == 0
    (video,) = stage.do(VideoEvent("r1", FRAME, 24.0))
    assert progress.destination is video.destination is None
    assert (progress.body.step, progress.body.steps) == (3, 8)
    assert (video.body.frames.shape, video.body.frames_per_second) == ((1, 1, 2, 3), 24.0)
    assert bytes(video.buffers[0]) == FRAME.data


def test_latents_reach_the_decoder_one_by_one_and_the_last_is_the_picture() -> None:
    processor = Latents2Image(0, ("dit",))
    (start,) = processor.feed("dit", InputPiece(tensors={LATENTS: NOISE}, scalars={"width": 16}))
    assert isinstance(start, Start)
    assert start.inputs.tensors == {LATENTS: NOISE}
    assert start.inputs.scalars == {"width": 16}
    assert not start.inputs.complete
    assert processor.feed("dit", InputPiece()) == []
    assert processor.feed("dit", InputPiece(tensors={LATENTS: RED}, final=True)) == [Extend(RED, complete=True)]


PICTURE = ImageChunk(pixels=TensorRef(DType.U8, (1, 2, 3), 0))
SECOND_OF_VIDEO = VideoChunk(frames=TensorRef(DType.U8, (24, 1, 2, 3), 0), frames_per_second=24.0)


def test_after_a_replay_a_video_goes_on() -> None:
    state = ready(outputs=["video"])
    ask(state, "r1", ALICE, "video")
    assert say(state, "code2wav", SECOND_OF_VIDEO, buffers=(b"",))
    lose(state, "code2wav")
    bring_back(state, "code2wav")
    assert again(state, "code2wav", SECOND_OF_VIDEO, 0, 2, buffers=(b"",)) == []
    (more,) = again(state, "code2wav", SECOND_OF_VIDEO, 1, 2, buffers=(b"",))
    assert more.body == SECOND_OF_VIDEO


@pytest.mark.parametrize("delivered", [PICTURE, SECOND_OF_VIDEO], ids=["picture", "video"])
def test_a_replay_without_what_was_delivered_fails(delivered: ImageChunk | VideoChunk) -> None:
    state = ready(outputs=[delivered.modality])
    ask(state, "r1", ALICE, delivered.modality)
    assert say(state, "code2wav", delivered, buffers=(b"",))
    for stage in ("prompt", "thinker", "talker"):
        say(state, stage, done())
    lose(state, "code2wav")
    bring_back(state, "code2wav")
    assert failure(again(state, "code2wav", done(), 0, 2)).code is ErrorCode.STAGE_LOST
