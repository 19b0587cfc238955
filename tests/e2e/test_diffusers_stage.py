"""Stages of kind `diffusers`: pipelines of six families give what diffusers gives, and take turns step by step."""

from __future__ import annotations

import base64
import functools
import io
import json
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import diffusers
import httpx
import numpy
import openai
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image, ImageOps
from transformers import AutoTokenizer

from omni_actors import config
from omni_actors.engine import pipelines
from omni_actors.engine.pipelines import DiffusersEngine
from omni_actors.errors import ConfigError, InvalidRequest, OmniError
from omni_actors.protocol.fields import DType, HostTensor, TensorRef
from omni_actors.protocol.payloads import ChatMessage, ContentPart, Media, MediaEncoding, Prompt, StageParams
from omni_actors.stage.engine_interface import (
    AudioEvent,
    EngineEvent,
    ErrorEvent,
    FinishedEvent,
    ImageEvent,
    ProgressEvent,
    StageInputs,
    StageRequest,
    VideoEvent,
)
from tests.support.servers import HttpPipeline
from tests.support.tiny_pipelines import BUILT, write
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")

SIZE = {"width": 32, "height": 32}
ON_CPU = {"stages.pictures.engine.dtype": "float32"}
SEA = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (64, 64, 3), numpy.uint8))
NO_GUIDANCE = {
    **{"guidance_scale": 1.0, "audio_guidance_scale": 1.0, "modality_scale": 1.0, "audio_modality_scale": 1.0},
    **{"stg_scale": 0.0, "audio_stg_scale": 0.0, "spatio_temporal_guidance_blocks": None, "max_sequence_length": 16},
}
# What each family needs besides: options of the stage, and the arguments of a call of diffusers itself.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z_image": ({}, SIZE),
    "qwen_image": ({"arguments": {"true_cfg_scale": 1.0}}, {**SIZE, "true_cfg_scale": 1.0}),
    "flux2_klein": ({}, SIZE),
    "stable_diffusion_3": ({}, SIZE),
    "sana": ({"arguments": {"use_resolution_binning": False}}, {**SIZE, "use_resolution_binning": False}),
    "ltx2": ({"arguments": NO_GUIDANCE}, {**SIZE, **NO_GUIDANCE, "num_frames": 9}),
    "wan": (
        {"arguments": {"max_sequence_length": 16}},
        {**SIZE, "max_sequence_length": 16, "num_frames": 9, "output_type": "pil"},
    ),
    "stable_audio": ({"parameters": {"audio_end_in_s": [0.001, 1.0]}}, {"audio_end_in_s": 0.01}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, tiny_z_image, tiny_qwen_image):
    """The folder of a family's checkpoint, by name."""
    root = tmp_path_factory.mktemp("pipelines")

    @functools.cache
    def folder(name: str) -> Path:
        if name not in BUILT:
            return {"z_image": tiny_z_image, "qwen_image": tiny_qwen_image}[name]
        return write(name, root, AutoTokenizer.from_pretrained(tiny_z_image / "tokenizer"))

    return folder


OUTPUTS = {"stable_audio": ["audio"], "ltx2": ["video", "audio"], "wan": ["video"]}


def made(
    folder: Path, tmp_path: Path, outputs: Sequence[str] = ("image",), adapters: Sequence[Path] = (), **options: Any
) -> DiffusersEngine:
    stage = {"name": "it", "kind": "diffusers", "outputs": list(outputs), "engine": {"dtype": "float32", **options}}
    file, by_name = tmp_path / "pipeline.yaml", {path.name: str(path) for path in adapters}
    file.write_text(yaml.safe_dump({"name": "it", "model": str(folder), "stages": [stage], "adapters": by_name}))
    pipeline = config.load(file, {}).pipeline
    return DiffusersEngine(pipeline, pipeline.stages[0])


@pytest.fixture
def engine_of(folder_of, tmp_path):
    engines = []

    def engine(name: str, **options: Any) -> DiffusersEngine:
        outputs = OUTPUTS.get(name, ["image"])
        engines.append(made(folder_of(name), tmp_path, outputs, **{**FAMILIES[name][0], **options}))
        return engines[-1]

    yield engine
    for each in engines:
        each.shutdown()


def start(
    engine: DiffusersEngine, name: str, text: str = "A red fox.", seed: int = 0, priority: int = 0,
    files: Sequence[bytes] = (), **params: Any,
) -> None:  # fmt: skip
    pictures = tuple(Media("image", MediaEncoding.FILE, TensorRef(DType.U8, (len(file),), 0)) for file in files)
    parts = (*(ContentPart(media=index) for index, _ in enumerate(pictures)), ContentPart(text=text))
    prompt = Prompt(messages=(ChatMessage(role="user", content=parts),), media=pictures)
    media = [HostTensor(DType.U8, (len(file),), file) for file in files]
    engine.start(
        StageRequest(name, StageParams(**params), seed, priority=priority), StageInputs(prompt=prompt, media=media)
    )


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def events_of(engine: DiffusersEngine) -> list[EngineEvent]:
    """All events until nothing is left."""
    events: list[EngineEvent] = []
    while engine.runnable() or engine.busy():
        until(engine.runnable, 60, "pictures are decoded")
        events += engine.step()
    return events


def array_of(tensor: HostTensor) -> numpy.ndarray:
    dtype = numpy.uint8 if tensor.dtype is DType.U8 else numpy.float32
    return numpy.frombuffer(tensor.data, dtype).reshape(tensor.shape)


def outputs_of(events: list[EngineEvent]) -> dict[str, list[numpy.ndarray]]:
    found: dict[str, list[numpy.ndarray]] = defaultdict(list)
    for event in events:
        assert not isinstance(event, ErrorEvent), event
        if isinstance(event, ImageEvent):
            found[event.request_id].append(array_of(event.pixels))
        elif isinstance(event, VideoEvent):
            found[event.request_id].append(array_of(event.frames))
        elif isinstance(event, AudioEvent):
            found[event.request_id].append(array_of(event.samples))
    return found


def reference(
    folder: Path, text: str, seed: int, kind: str = "DiffusionPipeline", **arguments: Any
) -> list[numpy.ndarray]:
    """What diffusers makes of the same: a picture, a sound, or a sound and a video."""
    pipeline = getattr(diffusers, kind).from_pretrained(folder, dtype=torch.float32)
    result = pipeline(prompt=text, generator=torch.Generator().manual_seed(seed), **arguments)
    if hasattr(result, "audios"):
        return [result.audios[0].mean(0).numpy()]
    if hasattr(result, "frames"):
        sounds = [result.audio[0].mean(0).numpy()] if hasattr(result, "audio") else []
        return [*sounds, numpy.stack(result.frames[0])]
    return [numpy.asarray(result.images[0])]


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_that_take_turns_get_what_diffusers_gives(engine_of, folder_of, name: str) -> None:
    engine, arguments = engine_of(name), FAMILIES[name][1]
    params: dict[str, Any] = SIZE
    if name == "stable_audio":
        params = {"extra_args": arguments}
    if "video" in OUTPUTS.get(name, ()):
        params = {**SIZE, "extra_args": {"seconds": 8 / (24 if name == "ltx2" else 16)}}
    asked = {"first": ("A red fox.", 3, 3), "second": ("The blue sea.", 4, 5)}
    for request_id, (text, seed, steps) in asked.items():
        start(engine, request_id, text, seed, num_steps=steps, **params)
    events = events_of(engine)
    found = outputs_of(events)
    for request_id, (text, seed, steps) in asked.items():
        wanted = reference(folder_of(name), text, seed, num_inference_steps=steps, **arguments)
        assert len(found[request_id]) == len(wanted) == len(OUTPUTS.get(name, "1"))
        for one, other in zip(found[request_id], wanted, strict=True):
            assert numpy.array_equal(one, other), name
            assert other.std() > 0
    turns = [(event.request_id, event.step, event.steps) for event in events if isinstance(event, ProgressEvent)]
    assert turns[:4] == [("first", 1, 3), ("second", 1, 5), ("first", 2, 3), ("second", 2, 5)]
    assert [event.output_tokens for event in events if isinstance(event, FinishedEvent)] == [3, 5]
    assert engine.counts() == {"requests": 0}


@pytest.mark.parametrize("name", ["z_image", "qwen_image", "flux2_klein", "stable_diffusion_3", "sana"])
def test_previews_are_what_diffusers_makes_when_it_is_interrupted(engine_of, folder_of, name: str) -> None:
    engine, arguments = engine_of(name), FAMILIES[name][1]
    start(engine, "beside", "The blue sea.", seed=4, num_steps=6, **SIZE)
    start(engine, "shown", seed=3, num_steps=6, previews=2, **SIZE)
    events = events_of(engine)
    pictures = [event for event in events if isinstance(event, ImageEvent) and event.request_id == "shown"]
    assert [picture.preview for picture in pictures] == [True, True, False]
    mine = [event for event in events if event.request_id == "shown" and not isinstance(event, FinishedEvent)]
    order = [getattr(event, "step", "picture") for event in mine]
    assert order == [1, 2, "picture", 3, 4, "picture", 5, 6, "picture"]
    for picture, last in zip(pictures, (2, 4, 6), strict=True):

        def stop(pipeline: Any, step: int, moment: Any, tensors: dict[str, Any], last: int = last) -> dict[str, Any]:
            pipeline._interrupt = step + 1 == last
            return {}

        (wanted,) = reference(
            folder_of(name), "A red fox.", 3, num_inference_steps=6, callback_on_step_end=stop, **arguments
        )
        assert numpy.array_equal(array_of(picture.pixels), wanted), (name, last)
    (other,) = outputs_of(events)["beside"]
    assert numpy.array_equal(
        other, reference(folder_of(name), "The blue sea.", 4, num_inference_steps=6, **arguments)[0]
    )


@pytest.mark.parametrize("name", ["stable_audio", "wan"])
def test_what_is_no_picture_has_no_previews(engine_of, name: str) -> None:
    assert "previews" not in {parameter.name for parameter in engine_of(name).facts.parameters}


def write_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter of a pipeline's transformer with random weights, as diffusers saves it."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(seed)
    pipeline.transformer.add_adapter(
        LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    )
    layers = get_peft_model_state_dict(pipeline.transformer)
    type(pipeline).save_lora_weights(folder, transformer_lora_layers=layers)
    return folder


@pytest.mark.parametrize("name", ["z_image", "stable_diffusion_3"])
def test_requests_with_different_adapters_take_turns(folder_of, tmp_path, name: str) -> None:
    adapters = [write_adapter(folder_of(name), tmp_path / f"style{seed}", seed) for seed in (1, 2)]
    engine = made(folder_of(name), tmp_path, adapters=adapters)
    asked = {"none": None, "one": "style1", "two": "style2", "again": None}
    for request_id, adapter in asked.items():
        start(engine, request_id, seed=3, num_steps=3, adapter=adapter, **SIZE)
    found = outputs_of(events_of(engine))
    for request_id, adapter in asked.items():
        pipeline = diffusers.DiffusionPipeline.from_pretrained(folder_of(name), dtype=torch.float32)
        if adapter is not None:
            pipeline.load_lora_weights(tmp_path / adapter)
        given = {"generator": torch.Generator().manual_seed(3), "num_inference_steps": 3, **SIZE}
        wanted = numpy.asarray(pipeline(prompt="A red fox.", **given).images[0])
        assert numpy.array_equal(found[request_id][0], wanted), request_id
    assert len({picture.tobytes() for (picture,) in found.values()}) == 3
    engine.shutdown()


def test_an_adapter_of_something_else_is_named(folder_of, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"adapters\.empty: ZImagePipeline cannot load"):
        made(folder_of("z_image"), tmp_path, adapters=[tmp_path / "empty"])
    with pytest.raises(ConfigError, match=r"adapters\.style: ZImagePipeline cannot load"):
        made(
            folder_of("z_image"), tmp_path,
            adapters=[write_adapter(folder_of("stable_diffusion_3"), tmp_path / "style", 1)],
        )  # fmt: skip


def test_a_video_follows_its_sound_in_chunks_of_whole_frames(engine_of, monkeypatch) -> None:
    monkeypatch.setattr(pipelines, "CHUNK_BYTES", 4 * 32 * 32 * 3)
    engine = engine_of("ltx2", arguments={**NO_GUIDANCE, "frame_rate": 12.0, "num_frames": 5})
    (seconds,) = [one for one in engine.facts.parameters if one.name == "seconds"]
    assert (seconds.kind, seconds.least, seconds.most) == ("float", 0, 120)
    start(engine, "video", num_steps=1, extra_args={"seconds": 2 / 3}, **SIZE)
    sound, *chunks = [event for event in events_of(engine) if isinstance(event, AudioEvent | VideoEvent)]
    assert (type(sound), sound.sample_rate) == (AudioEvent, 16_000)
    assert [chunk.frames.shape for chunk in chunks] == [(4, 32, 32, 3), (4, 32, 32, 3), (1, 32, 32, 3)]
    assert {chunk.frames_per_second for chunk in chunks} == {12.0}
    start(engine, "short", num_steps=1, **SIZE)  # as long as the arguments of each call say
    assert [len(part) for part in outputs_of(events_of(engine))["short"][1:]] == [4, 1]
    start(engine, "large", width=4096, height=4096, extra_args={"seconds": 2.0})
    (event,) = events_of(engine)
    assert isinstance(event, ErrorEvent)
    assert (event.error.code, event.error.field) == ("invalid_request", "seconds")


def test_a_picture_is_changed(engine_of, folder_of) -> None:
    engine = engine_of("qwen_image")
    start(engine, "changed", "Make it red.", 5, num_steps=2, files=[png(SEA)], **SIZE)
    ((found,),) = outputs_of(events_of(engine)).values()
    (wanted,) = reference(
        folder_of("qwen_image"), "Make it red.", 5, image=SEA, num_inference_steps=2, **FAMILIES["qwen_image"][1]
    )
    assert numpy.array_equal(found, wanted)
    start(engine, "broken", "Make it red.", files=[b"no picture"])
    (event,) = events_of(engine)
    assert isinstance(event, ErrorEvent)
    assert event.error.code == "malformed_media"


def test_a_mask_says_where_a_picture_changes(engine_of, folder_of) -> None:
    kind = "ZImageInpaintPipeline"
    engine = engine_of("z_image", pipeline=kind, parameters={"strength": [0, 1]})
    assert "mask" in [one.name for one in engine.facts.parameters]
    half = Image.fromarray(numpy.repeat(numpy.uint8([[0] * 32 + [255] * 32]), 64, 0))
    clear = Image.merge("RGBA", (*SEA.split(), ImageOps.invert(half)))  # transparent where the other one is white
    asked = {"num_steps": 4, "width": 64, "height": 64, "extra_args": {"mask": True, "strength": 0.5}}
    for name, mask in (("white", half), ("transparent", clear)):
        start(engine, name, seed=5, files=[png(SEA), png(mask)], **asked)
    found = outputs_of(events_of(engine))
    given = {"image": SEA, "mask_image": half, "strength": 0.5, "num_inference_steps": 4, "width": 64, "height": 64}
    (wanted,) = reference(folder_of("z_image"), "A red fox.", 5, kind, **given)
    assert numpy.array_equal(found["white"][0], wanted)
    assert numpy.array_equal(found["transparent"][0], wanted)
    for files in ([], [png(half)]):
        with pytest.raises(InvalidRequest, match="changes pictures, and there is none"):
            start(engine, "it", files=files, extra_args={"mask": True})
    assert engine.counts() == {"requests": 0}


def test_priority_goes_first_and_an_abort_ends_a_call_between_two_steps(engine_of) -> None:
    threads = threading.active_count()
    engine = engine_of("z_image", max_num_seqs=2)
    start(engine, "slow", num_steps=50, **SIZE)
    assert [event.step for _ in range(3) for event in engine.step()] == [1, 2, 3]
    start(engine, "late", num_steps=50, **SIZE)
    assert [event.request_id for _ in range(4) for event in engine.step()] == ["late", "slow"] * 2
    engine.abort("late")
    start(engine, "urgent", num_steps=2, priority=-1, **SIZE)
    start(engine, "third", num_steps=2, **SIZE)  # finds no place
    events = [event for _ in range(3) for event in engine.step()]  # two steps, and the picture of its latents
    assert {event.request_id for event in events} == {"urgent"}
    assert isinstance(events[-1], FinishedEvent)
    assert [event.request_id for event in engine.step()] == ["third"]
    engine.abort("slow")
    assert set(outputs_of(events_of(engine))) == {"third"}
    assert engine.counts() == {"requests": 0}
    engine.shutdown()
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"num_steps": 1001}, "num_steps"),
        ({"extra_args": {"strength": 0.5}}, "strength"),
        ({"previews": 17}, "previews"),
    ],
)
def test_what_the_pipeline_does_not_take_is_refused(engine_of, params, field: str) -> None:
    engine = engine_of("z_image")
    with pytest.raises(InvalidRequest) as caught:
        start(engine, "it", **params)
    assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="takes 0 pictures"):
        start(engine, "it", files=[b"..."])
    assert engine.counts() == {"requests": 0}
    start(engine, "odd", num_steps=1, width=33, height=33)  # which the pipeline itself refuses
    (event,) = events_of(engine)
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, InvalidRequest)
    assert "divisible" in event.error.message


def test_outputs_that_a_pipeline_does_not_make_are_refused(folder_of, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"makes video: the outputs are \[video\]"):
        made(folder_of("ltx2"), tmp_path, ["image"])
    with pytest.raises(ConfigError, match="makes no video"):
        made(folder_of("z_image"), tmp_path, ["video"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline": "NoSuchPipeline"}, "has no pipeline 'NoSuchPipeline'"),
        ({"pipeline": "logging"}, "has no pipeline 'logging'"),
        ({"arguments": {"strenght": 1}}, "has no argument 'strenght'"),
        ({"parameters": {"mask": [0, 1]}}, "has no argument 'mask'"),
        ({"arguments": {"prompt": "x"}}, "arguments.prompt is set by the stage itself"),
        ({"steps": 4}, "engine"),
    ],
)
def test_wrong_options_are_named(folder_of, tmp_path, options, words: str) -> None:
    with pytest.raises(OmniError, match=words) as caught:
        made(folder_of("z_image"), tmp_path, **options)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
def test_a_pipeline_serves_video_with_its_sound_over_http(folder_of) -> None:
    options = {"engine.dtype": "float32", "engine.arguments": json.dumps(NO_GUIDANCE), "outputs": '["video", "audio"]'}
    overrides = {"model": folder_of("ltx2"), **{f"stages.video.{name}": value for name, value in options.items()}}
    with HttpPipeline("stage_configs/diffusers_video.yaml", overrides) as pipeline:
        client, steps = pipeline.openai(), {"num_inference_steps": 3}
        job = client.videos.create(prompt="A red fox.", seconds="0.5", size="64x64", extra_body={**steps, "seed": 3})
        until(lambda: client.videos.retrieve(job.id).status == "completed", 60, what="the video is made")
        with av.open(io.BytesIO(client.videos.download_content(job.id).read())) as file:
            found = numpy.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
            assert file.streams.audio[0].rate == 16_000
        given = {**steps, **NO_GUIDANCE, "width": 64, "height": 64, "num_frames": 13}
        _, wanted = reference(folder_of("ltx2"), "A red fox.", 3, **given)
        assert found.shape == wanted.shape
        assert numpy.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.8  # noise, which H.264 blurs


@pytest.mark.nightly  # the engine is tested above, the routes with echo stages
def test_a_pipeline_serves_it_over_http(tiny_z_image, tmp_path) -> None:
    adapters = json.dumps({"style": str(write_adapter(tiny_z_image, tmp_path / "style", 1))})
    overrides = {"model": tiny_z_image, "adapters": adapters, **ON_CPU}
    with HttpPipeline("stage_configs/diffusers.yaml", overrides) as pipeline:
        body = {"prompt": "A red fox.", "size": "32x32", "num_inference_steps": 3, "seed": 3}
        client = pipeline.openai().images
        answer = client.generate(
            model="diffusers", prompt=body["prompt"], size="32x32", n=2,
            extra_body={"num_inference_steps": 3, "seed": 3},
        )  # fmt: skip
        for seed, one in enumerate(answer.data, 3):
            found = numpy.asarray(Image.open(io.BytesIO(base64.b64decode(one.b64_json))))
            (wanted,) = reference(tiny_z_image, body["prompt"], seed, num_inference_steps=3, **SIZE)
            assert numpy.array_equal(found, wanted)
        styled = client.generate(
            model="style", prompt=body["prompt"], size="32x32", extra_body={"num_inference_steps": 3, "seed": 4}
        )
        assert styled.data[0].b64_json != answer.data[1].b64_json
        with pytest.raises(openai.BadRequestError, match="This model takes no mask") as caught:
            client.edit(prompt="blue", image=("a.png", png(SEA)), mask=("m.png", png(SEA)))
        assert (caught.value.param, caught.value.code) == ("mask", "unsupported_parameter")
        events = httpx.post(
            f"{pipeline.url}/v1/images/generations", json={**body, "stream": True, "progress": True}, timeout=60
        )
        steps = re.findall(r'"type":"image_generation.progress","step":(\d),"steps":3', events.text)
        assert steps == ["1", "2", "3"]
        refused = httpx.post(f"{pipeline.url}/v1/images/generations", json={**body, "size": "33x33"}, timeout=60)
        assert (refused.status_code, "divisible" in refused.text) == (400, True)
