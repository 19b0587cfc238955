"""What stages make of a model's output: pictures, rows, counts; what a diffusion worker refuses to load."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from vllm.v1.engine import EngineCoreOutput, FinishReason

from omni_actors.engine.diffusion import picture_events
from omni_actors.engine.models.frame_talker import FrameOutputs
from omni_actors.engine.models.minicpm_o.config import QUERIES, MiniCpmOConfig, hearing_part, seeing_part
from omni_actors.engine.models.minicpm_o.pictures import PIXELS, SIZES, patches_of, slices_of
from omni_actors.engine.models.minicpm_o.prompt import media_embeddings
from omni_actors.engine.models.qwen3_omni.thinker import SPEC, TokenOutputs
from omni_actors.engine.rows import to_torch
from omni_actors.engine.workers.base import attach
from omni_actors.engine.workers.diffusion import FAILED_TOKEN, STEP_TOKEN, DiffusionOutput, DiffusionWorker, StepResult
from omni_actors.errors import ConfigError, EngineError, ModelOutputInvalid
from omni_actors.protocol.fields import ReplicaId
from omni_actors.stage.engine_interface import ImageEvent, LatentsEvent, OutputEvent, StreamEvent, TextEvent
from omni_actors.stage.meter import StageMeter
from omni_actors.telemetry import metrics as table


def test_a_step_shows_latents_as_a_preview_and_the_last_one_gives_those_of_the_picture():
    (shown,) = picture_events("a", {"preview": torch.zeros(4, 2, 2)}, preview=False)
    (last,) = picture_events("a", {"latents": torch.ones(4, 2, 2)}, preview=False)
    assert isinstance(shown, LatentsEvent)
    assert shown.preview
    assert isinstance(last, LatentsEvent)
    assert not last.preview
    assert torch.equal(to_torch(last.latents), torch.ones(4, 2, 2))


def test_a_picture_is_a_preview_if_its_job_is_one():
    for preview in (True, False):
        (event,) = picture_events("a", {"image": torch.zeros(8, 8, 3, dtype=torch.uint8)}, preview=preview)
        assert isinstance(event, ImageEvent)
        assert event.preview is preview


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"latents": torch.tensor([1.0, float("nan")])}, "NaN or infinite"),
        ({"preview": torch.tensor([1.0, float("inf")])}, "NaN or infinite"),
        ({"preview": torch.tensor([float("-inf"), 1.0], dtype=torch.bfloat16)}, "NaN or infinite"),
        ({"image": torch.zeros(8, 8, 3)}, "float32"),
        ({"image": torch.zeros(8, 8, dtype=torch.uint8)}, r"\[8, 8\]"),
    ],
)
def test_what_cannot_be_shown_is_an_error_of_the_model(result, message):
    with pytest.raises(ModelOutputInvalid, match=message):
        picture_events("a", result, preview=False)


END = 99
SAMPLED = 14  # tokens of a request, with the last, which has neither frame nor sound


def steps(*, frames: bool = False) -> Iterable[EngineCoreOutput]:
    for index in range(SAMPLED):
        last = index == SAMPLED - 1
        output = EngineCoreOutput("r", [END if last else index], finish_reason=FinishReason.STOP if last else None)
        if frames:
            attach(output, {"codes": [index, *range(15)]})
        yield output


def counted(events: Iterable[OutputEvent], outputs: tuple[str, ...] = ()) -> int:
    meter = StageMeter(ReplicaId("talker", 0, 1))
    timings = meter.opened(0, has_input=True)
    for event in events:
        meter.output(timings, event, outputs)
    return int(meter.meters.values[(table.OUTPUT_TOKENS.name, meter.labels)])


@pytest.mark.parametrize("lead", [0, 3], ids=["a text", "a clip that is continued"])
def test_a_frame_counts_once_and_the_frames_of_a_clip_do_not(lead: int) -> None:
    outputs = FrameOutputs("r")
    outputs.lead([7] * 16 * lead)
    events = [event for output in steps(frames=True) for event in outputs.convert(output)]
    assert sum(len(event.token_ids) for event in events if isinstance(event, StreamEvent)) == 16 * (SAMPLED - 1 + lead)
    assert counted(events) == SAMPLED


@pytest.mark.parametrize("modalities", [("text",), ()])
def test_a_thinker_that_streams_its_text_counts_it_once_and_not_its_prompt(modalities: tuple[str, ...]) -> None:
    outputs = TokenOutputs("r", [1, 2, 3], decoder=None, streams=True)
    stream: list[OutputEvent] = []
    for number, output in enumerate(steps()):
        stream.append(TextEvent("r", "x", output.new_token_ids))
        event = outputs.stream(output, number + 1, final=number == SAMPLED - 1)
        stream += [event] if event is not None else []
    assert counted(stream, modalities) == SAMPLED


PROMPT = [5, 9, 9, 9, 6, 9, 7]
PLACES = [1, 2, 3, 5]  # of media


def output(start: int, end: int, *tokens: int, finished: bool = False) -> EngineCoreOutput:
    """Positions `start` to `end` of the prompt have been computed; row k of media has the value of its place."""
    places = torch.tensor([place for place in PLACES if start <= place < end], dtype=torch.int64)
    part: dict[str, Any] = {"media_rows": places[:, None].float(), "places": places, "end": end}
    if start == 0:
        part["mrope_positions"] = torch.arange(len(PROMPT)).expand(3, -1)
    reason = FinishReason.LENGTH if finished else None
    made = EngineCoreOutput(request_id="r", new_token_ids=list(tokens), finish_reason=reason)
    attach(made, part)
    return made


def test_rows_of_positions_that_are_computed_twice_come_once():
    outputs = TokenOutputs("r", PROMPT, decoder=None, streams=True)
    assert outputs.stream(output(0, 3), 0, final=False) is None
    assert outputs.stream(output(0, 2), 0, final=False) is None, "preempted, and computed again"
    assert outputs.stream(output(2, 6), 0, final=False) is None
    event = outputs.stream(output(6, 7, 20), 1, final=False)
    assert to_torch(event.tensors["media_rows"]).flatten().tolist() == PLACES
    assert list(event.token_ids) == [*PROMPT, 20]
    assert event.scalars == {"prompt_tokens": len(PROMPT)}
    assert outputs.stream(output(7, 8, 21), 1, final=False) is None, "its text is held back"
    last = outputs.stream(output(8, 9, 22, finished=True), 3, final=True)
    assert (list(last.token_ids), last.start, last.final) == ([21], len(PROMPT) + 1, True)


def test_a_second_of_video_has_the_positions_that_the_checkpoint_says(tiny_qwen3_checkpoint):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_qwen3_checkpoint)
    assert SPEC.media.positions_per_second(config) == config.thinker_config.position_id_per_seconds == 13


CPU = None  # the copy stream


def test_an_output_with_several_tensors_and_dtypes_reaches_each_request_whole() -> None:
    spoken = {
        "audio": torch.linspace(-1, 1, 5),
        "mel": torch.arange(12.0).view(3, 4).T,  # in another layout
        "codes": torch.tensor([[7, 8], [9, 10]]),
        "half": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16),
    }
    shown = {
        "image": torch.randint(0, 255, (2, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        "audio": torch.tensor([0.5]),
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "score": torch.tensor(0.75),
        "codes": torch.tensor([11]),
    }
    error = EngineError("no luck")
    results = {"b": StepResult(spoken), "bad": StepResult(error=error), "a": StepResult(shown), "early": StepResult()}
    output = DiffusionOutput(["a", "early", "b", "bad"], results, CPU).get_output()
    assert output.req_ids == ["a", "early", "b", "bad"]
    assert output.sampled_token_ids == [[STEP_TOKEN], [STEP_TOKEN], [STEP_TOKEN], [FAILED_TOKEN]]
    first, early, second, bad = output.pooler_output
    assert early is None
    assert bad == {"error": error}
    for attached, tensors in ((first, shown), (second, spoken)):
        assert attached.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert attached[name].dtype == tensor.dtype, name
            assert attached[name].shape == tensor.shape, name
            assert torch.equal(attached[name], tensor), name
            own = attached[name].numel() * attached[name].itemsize
            assert attached[name].untyped_storage().nbytes() == own, f"{name} keeps the memory of the batch alive"


def worker(runner: str) -> DiffusionWorker:
    """A worker before it has loaded a model, for a stage whose model names this runner."""
    made = object.__new__(DiffusionWorker)
    options = {"runner": runner, "model": "", "model_stage": ""}
    made.vllm_config = SimpleNamespace(
        additional_config={"omni": options}, parallel_config=SimpleNamespace(world_size=1)
    )
    return made


@pytest.mark.parametrize(
    ("runner", "text"),
    [
        ("", "names no diffusion model runner"),
        ("omni_actors.engine.models.qwen2_5_omni.dit.Dit", "dit.Dit is not a DiffusionModelRunner"),
        ("omni_actors.engine.workers.diffusion.diffusion_job", "diffusion_job is not a DiffusionModelRunner"),
    ],
)
def test_what_is_no_runner_is_refused_by_name(runner: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        worker(runner).load_model()


@pytest.mark.parametrize(
    ("part", "given", "name"),
    [
        (hearing_part, {"audio_pool_step": 2, "audio_config": {}}, "audio_pool_step"),
        (seeing_part, {"query_num": 96, "vision_config": {}}, "query_num"),
        (seeing_part, {"vision_config": {"patch_size": 16}}, "vision_config.patch_size"),
    ],
)
def test_encoders_of_another_kind_are_refused_by_name(part, given, name):
    with pytest.raises(ConfigError, match=f"{name} of the checkpoint"):
        part(MiniCpmOConfig(**given))


def test_features_of_a_picture_have_as_many_patches_as_their_slices():
    patches, sizes = patches_of(slices_of(Image.new("RGB", (1000, 700))))
    assert media_embeddings("image", {PIXELS: patches, SIZES: sizes}) == 5 * QUERIES
    for wrong in (
        {PIXELS: patches[1:], SIZES: sizes},
        {PIXELS: patches[..., 1:], SIZES: sizes},
        {PIXELS: patches, SIZES: -sizes},
        {PIXELS: patches, SIZES: sizes[:, :1]},
    ):
        assert media_embeddings("image", wrong) == -1
