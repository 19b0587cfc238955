"""Pictures, latents and progress on their way from an engine to the client."""

from __future__ import annotations

import msgspec
import numpy
import pytest

from omni_actors.client.streams import RequestStream, item_of
from omni_actors.config import Modality, StageConfig, StageKind
from omni_actors.config.schema import InputConfig
from omni_actors.coordinator.core.instructions import ToClient
from omni_actors.coordinator.core.requests import RequestMachine
from omni_actors.errors import ErrorCode, InvalidPayload
from omni_actors.protocol import messages
from omni_actors.protocol.fields import DType, HostTensor, ReplicaId, TensorRef
from omni_actors.protocol.messages import (
    LATENTS,
    PIXELS,
    Chunk,
    Done,
    FinishReason,
    ImageChunk,
    LatentsChunk,
    StageUsage,
    VideoChunk,
)
from omni_actors.stage.engine_interface import FinishedEvent, ImageEvent, LatentsEvent, ProgressEvent, VideoEvent
from omni_actors.stage.meter import StageMeter
from omni_actors.stage.processors import Extend, InputPiece, Latents2Image, Start
from omni_actors.telemetry import metrics as table
from tests.support.builders import done, header_from
from tests.support.requests import ALICE, NOW, again, ask, bring_back, failure, lose, ready, replica_id, say
from tests.support.stage import ROUTE, StageUnderTest, bodies

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


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (DType.F32, (2, 2, 3)),
        (DType.U8, (2, 2)),
        (DType.U8, (2, 2, 1)),
        (DType.U8, (2, 2, 5)),
        (DType.U8, (0, 2, 3)),
        (DType.U8, (1, 2, 2, 3)),
    ],
)
def test_a_picture_has_bytes_rows_and_three_or_four_channels(dtype: DType, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidPayload, match=r"A picture must be u8 of shape \[height, width, 3 or 4\]"):
        ImageChunk(pixels=TensorRef(dtype, shape, 0))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(DType.F32, (1, 2, 2, 3)), (DType.U8, (2, 2, 3)), (DType.U8, (1, 2, 2, 4)), (DType.U8, (0, 2, 2, 3))],
)
def test_a_video_has_frames_rows_and_three_channels(dtype: DType, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidPayload, match=r"A video must be u8 of shape \[frames, height, width, 3\]"):
        VideoChunk(frames=TensorRef(dtype, shape, 0), frames_per_second=24.0)


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
    assert end.body == Chunk(start=1, final=True, sent=end.body.sent)


def test_the_last_latents_end_the_stream_to_the_next_stage_and_those_of_previews_do_not() -> None:
    stage = stage_of(Modality.LATENTS)
    preview, to_client, to_next = stage.do(LatentsEvent("r1", NOISE, preview=True), LatentsEvent("r1", NOISE))
    assert (preview.destination, preview.body.final) == (ROUTE[3], False)
    assert isinstance(to_client.body, LatentsChunk)
    assert list(to_next.body.tensors) == [LATENTS]
    assert to_next.body.final
    (done,) = stage.do(FINISHED)
    assert isinstance(done.body, messages.StageDone), "no second end"


def test_a_video_goes_to_the_client_alone() -> None:
    stage = stage_of(Modality.VIDEO)
    (message,) = stage.do(VideoEvent("r1", FRAME, 24.0))
    assert message.destination is None
    assert (message.body.frames.shape, message.body.frames_per_second) == ((1, 1, 2, 3), 24.0)
    assert bytes(message.buffers[0]) == FRAME.data


def test_progress_goes_to_the_client_alone_and_is_no_output() -> None:
    meter = StageMeter(ReplicaId("talker", 0, 5))
    stage = stage_of(meter=meter)
    (message,) = stage.do(ProgressEvent("r1", 3, 8))
    assert sum(meter.meters.histogram(table.OUTPUT_SECONDS, *meter.labels).counts) == 0
    assert message.destination is None
    assert (message.body.step, message.body.steps) == (3, 8)
    *_, done = bodies(stage.do(FINISHED))
    assert done.usage.first_output == 0.0


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
PREVIEW = ImageChunk(pixels=TensorRef(DType.U8, (1, 2, 3), 0), preview=True)
SECOND_OF_VIDEO = VideoChunk(frames=TensorRef(DType.U8, (24, 1, 2, 3), 0), frames_per_second=24.0)
SOME_LATENTS = LatentsChunk(latents=TensorRef(DType.F32, (4, 2), 0))


def step(number: int) -> messages.StepsDone:
    return messages.StepsDone(step=number, steps=4)


def passed_on(
    state: RequestMachine, body: messages.Output, seq: int, stage: str = "code2wav", attempt: int = 0
) -> bool:
    """Whether the client gets what a stage sent in its first epoch, or after its loss."""
    sender = replica_id(stage, 0, 2 if attempt and stage == "code2wav" else 1)
    instructions = state.from_stage(header_from(sender, "r1", seq, attempt), body, (b"",), NOW)
    if not instructions:
        return False
    (message,) = instructions
    assert isinstance(message, ToClient)
    if isinstance(body, messages.StepsDone):
        assert message.body == msgspec.structs.replace(body, stage=stage)
    else:
        assert message.body == body
    return True


def test_after_a_replay_nothing_comes_twice() -> None:
    state = ready(outputs=["image", "latents"])
    ask(state, "r1", ALICE, "image", "latents")
    for seq, body in enumerate((step(1), PREVIEW, step(2), SOME_LATENTS, PICTURE)):
        assert passed_on(state, body, seq)
    lose(state, "code2wav")
    bring_back(state, "code2wav")
    repeated = (step(1), PREVIEW, step(2), SOME_LATENTS, PICTURE)
    assert not any(passed_on(state, body, seq, attempt=1) for seq, body in enumerate(repeated))
    for seq, body in enumerate((PREVIEW, step(3), PICTURE), 5):
        assert passed_on(state, body, seq, attempt=1), "this is new"


def test_after_a_replay_a_video_goes_on() -> None:
    state = ready(outputs=["video"])
    ask(state, "r1", ALICE, "video")
    assert passed_on(state, SECOND_OF_VIDEO, 0)
    lose(state, "code2wav")
    bring_back(state, "code2wav")
    assert [passed_on(state, SECOND_OF_VIDEO, seq, attempt=1) for seq in range(2)] == [False, True]


@pytest.mark.parametrize("delivered", [PICTURE, SECOND_OF_VIDEO], ids=["picture", "video"])
def test_a_replay_without_what_was_delivered_fails(delivered: ImageChunk | VideoChunk) -> None:
    state = ready(outputs=[delivered.modality])
    ask(state, "r1", ALICE, delivered.modality)
    assert passed_on(state, delivered, 0)
    for stage in ("prompt", "thinker", "talker"):
        say(state, stage, done())
    lose(state, "code2wav")
    bring_back(state, "code2wav")
    assert failure(again(state, "code2wav", done(), 0, 2)).code is ErrorCode.STAGE_LOST


async def test_the_result_has_pictures_video_and_latents_and_no_previews() -> None:
    stream = RequestStream("r1", lambda request_id: None, lambda *_: None)
    pixels, latents = TensorRef(DType.U8, (1, 2, 3), 0), TensorRef(DType.F32, (4, 2), 0)
    sent: list[tuple[messages.Output, HostTensor]] = [
        (messages.StepsDone(step=1, steps=2, stage="dit"), NOISE),
        (ImageChunk(pixels=pixels, preview=True), RED._replace(data=bytes(6))),
        (ImageChunk(pixels=pixels), RED),
        (LatentsChunk(latents=latents), NOISE),
        *[(VideoChunk(frames=TensorRef(DType.U8, (1, 1, 2, 3), 0), frames_per_second=24.0), FRAME)] * 2,
    ]
    for body, tensor in sent:
        stream.deliver(item_of(body, lambda ref, tensor=tensor: tensor))
    stream.deliver(Done(usage={"dit": StageUsage(FinishReason.STOP)}))
    output = await stream.result()
    (picture,) = output.images
    assert picture.dtype == numpy.uint8
    assert picture.tolist() == [[[255, 0, 0], [255, 0, 0]]]
    assert output.latents == [NOISE]
    assert output.video.tolist() == 2 * [[[[255, 0, 0], [255, 0, 0]]]]
    assert output.frames_per_second == 24.0
    assert output.text == ""
