"""Pictures, latents and progress on their way from an engine to the client."""

from __future__ import annotations

import pytest

from omni_actors.config import Modality, StageConfig, StageKind
from omni_actors.config.schema import InputConfig
from omni_actors.errors import ErrorCode
from omni_actors.protocol import messages
from omni_actors.protocol.fields import DType, HostTensor, ReplicaId, TensorRef
from omni_actors.protocol.messages import LATENTS, PIXELS, Chunk, FinishReason, ImageChunk, LatentsChunk, VideoChunk
from omni_actors.stage.engine_interface import FinishedEvent, ImageEvent, LatentsEvent, ProgressEvent, VideoEvent
from omni_actors.stage.meter import StageMeter
from omni_actors.stage.processors import Extend, InputPiece, Latents2Image, Start
from omni_actors.telemetry import metrics as table
from tests.support.builders import done
from tests.support.requests import ALICE, again, ask, bring_back, failure, lose, ready, say
from tests.support.stage import ROUTE, StageUnderTest

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
