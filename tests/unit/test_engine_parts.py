"""The pure parts of the engine package: tensors, sampling parameters, models, joined outputs."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PretrainedConfig
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.sample.ops import topk_topp_triton

from omni_actors.engine import models
from omni_actors.engine.autoregressive import WARM_UP_BATCHES, WARM_UP_MIXES
from omni_actors.engine.core import StepFailed, device_is_lost
from omni_actors.engine.diffusion import picture_events
from omni_actors.engine.encoded_requests import check_feature, merged_patches
from omni_actors.engine.models import CHAT, checkpoint_architecture, find_model_spec, load_plugins
from omni_actors.engine.models.code_talker import CodecOutputs
from omni_actors.engine.models.frame_talker import FrameOutputs
from omni_actors.engine.models.minicpm_o.config import QUERIES, MiniCpmOConfig, hearing_part, seeing_part
from omni_actors.engine.models.minicpm_o.pictures import PIXELS, SIZES, patches_of, slices_of
from omni_actors.engine.models.minicpm_o.prompt import media_embeddings
from omni_actors.engine.models.qwen2_5_omni.thinker import Qwen2_5OmniThinkerAdapter
from omni_actors.engine.models.qwen3_omni.talker import SPEC
from omni_actors.engine.models.qwen3_omni.thinker import TokenOutputs
from omni_actors.engine.rows import check_rows, to_host, to_torch
from omni_actors.engine.sampling import GrammarCompiler, check_prompt_logprobs, make_sampling_params
from omni_actors.engine.workers.base import attach
from omni_actors.engine.workers.diffusion import FAILED_TOKEN, STEP_TOKEN, DiffusionOutput, DiffusionWorker, StepResult
from omni_actors.errors import ConfigError, EngineError, InvalidPayload, InvalidRequest, ModelOutputInvalid
from omni_actors.protocol.fields import DType, HostTensor, ReplicaId
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineLost, OutputEvent, StreamEvent, TextEvent
from omni_actors.stage.meter import StageMeter
from omni_actors.telemetry import metrics as table

# ---------------------------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3)])
def test_tensors_survive_both_ways(dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    host = to_host(tensor)
    assert host.validate().shape == shape
    assert torch.equal(to_torch(host), tensor)
    assert torch.equal(to_torch(HostTensor(host.dtype, host.shape, bytes(host.data))), tensor)


def test_tensors_that_may_not_cross():
    with pytest.raises(InvalidPayload, match="float64"):
        to_host(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(InvalidPayload):
        to_torch(HostTensor(DType.F32, (3,), bytes(8)))
    for bad in (torch.zeros(2, 3), torch.zeros(4), torch.zeros(0, 4), torch.zeros(2, 4, dtype=torch.int32)):
        with pytest.raises(InvalidPayload):
            check_rows(to_host(bad), 4, "rows", minimum=1)
    check_rows(to_host(torch.zeros(1, 4)), 4, "rows", minimum=1)


def test_sampling_keeps_the_requests_own_stops_and_what_is_wrong_is_the_callers_fault():
    """What vLLM refuses itself: tests/e2e/autoregressive/test_against_vllm.py."""
    given = {"seed": 7, "end_token_ids": [3, 2], "vocabulary": 10}
    made = make_sampling_params(StageParams(max_tokens=5, ignore_eos=True, stop_token_ids=(9,)), **given)
    assert made.stop_token_ids == [9]
    for wrong in ({"num_steps": 3}, {"stop_token_ids": (10,)}, {"max_tokens": 0}):
        with pytest.raises(InvalidRequest):
            make_sampling_params(StageParams(**{"max_tokens": 5, **wrong}), **given)


# ---------------------------------------------------------------------------------------------------------------------
# Registry and arguments


def test_unknown_models_name_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match="thinker"):
        find_model_spec("Qwen2_5OmniModel", "thinking")
    with pytest.raises(ConfigError, match="Qwen2_5OmniModel"):
        find_model_spec("LlamaForCausalLLM", "thinker")
    with pytest.raises(ConfigError, match="needs a stage 'thinker'"):
        find_model_spec("LlamaForCausalLM", "talker")
    assert find_model_spec("LlamaForCausalLM", "thinker") is CHAT
    with pytest.raises(ConfigError):
        checkpoint_architecture(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "architectures": []}')
    with pytest.raises(ConfigError, match="one architecture"):
        checkpoint_architecture(str(tmp_path))


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a plugin module and loads it into a copy of the registry."""
    monkeypatch.setattr(models, "MODULES", dict(models.MODULES))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMNI_ACTORS_ALLOW_IMPORTS", "plugin_of_test")
    for name in [name for name in sys.modules if name.startswith("plugin_of_test")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "plugin_of_test"
    folder.mkdir()

    def write(models_text, spec="SPEC = ModelSpec(kind='diffusion', hf_overrides=lambda config: config)"):
        (folder / "__init__.py").write_text(f"MODELS = {models_text}")
        (folder / "own.py").write_text(f"from omni_actors.engine.models import ModelSpec\n{spec}")
        importlib.invalidate_caches()
        load_plugins(["plugin_of_test"])

    yield write
    for name in [name for name in sys.modules if name.startswith("plugin_of_test")]:
        del sys.modules[name]


@pytest.mark.parametrize("multiprocessors", [8, 14, 32, 66, 78, 108, 132, 188])
def test_a_start_samples_with_all_kernels_that_requests_need(multiprocessors: int) -> None:
    """vLLM splits a row of probabilities by how many requests there are and how much of a GPU."""
    splits = vars(topk_topp_triton)["_topp_split_count"]
    needed = {splits(requests, multiprocessors) for requests in range(1, 65)}
    assert {splits(requests, multiprocessors) for requests in WARM_UP_BATCHES} == needed
    limits = [{(one.top_k or 0) > 0: (one.top_p or 1) < 1 for one in mix if one.temperature} for mix in WARM_UP_MIXES]
    assert limits == [{True: True}, {True: False}, {False: True}], "both, top_k alone, top_p alone"


def test_log_probabilities_of_a_prompt_are_bounded():
    check_prompt_logprobs(StageParams(), 10**6, embeds=True)
    check_prompt_logprobs(StageParams(prompt_logprobs=1), 16_384, embeds=False)
    for count, positions, embeds, says in (
        (1, 16_385, False, "1 likeliest tokens .* at 16385 positions exceed the limit of 32768"),
        (20, 3_500, False, "at 3500 positions"),
        (0, 4, True, "embeddings has no tokens"),
    ):
        with pytest.raises(InvalidRequest, match=says) as caught:
            check_prompt_logprobs(StageParams(prompt_logprobs=count), positions, embeds=embeds)
        assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize(
    ("models_text", "word"),
    [
        ("{('Qwen2_5OmniModel', 'thinker'): 'plugin_of_test.own'}", "is already served by omni_actors"),
        ("{('OwnModel', 'thinker'): 'os'}", "outside the allowed"),
        ("{'OwnModel': 'plugin_of_test.own'}", r"maps \(architecture, stage\)"),
        ("{('OwnModel', 'thinker'): 3}", r"maps \(architecture, stage\)"),
        ("3", "must be a mapping"),
        ("1 / 0", "division"),
    ],
)
def test_plugins_that_are_refused(plugin, models_text, word):
    with pytest.raises(ConfigError, match=word):
        plugin(models_text)


# ---------------------------------------------------------------------------------------------------------------------
# The rest


def test_which_errors_end_the_process():
    assert device_is_lost(RuntimeError("CUDA error: an illegal memory access was encountered"))
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = torch.AcceleratorError("device-side assert triggered")
    assert device_is_lost(wrapped)
    assert not device_is_lost(torch.OutOfMemoryError("CUDA error: out of memory"))
    assert not device_is_lost(ValueError("shape"))
    assert StepFailed(["a"], ValueError("shape")).request_ids == ("a",)
    assert "restarts" in str(EngineLost("gone"))


def items(**tensors):
    return {name: SimpleNamespace(data=tensor) for name, tensor in tensors.items()}


def pixels(*grid, patches=12):
    return items(image_grid_thw=torch.tensor(grid), pixel_values=torch.zeros(patches, 4))


def audio(length, frames=None):
    return items(audio_feature_lengths=torch.tensor(length), input_audio_features=torch.zeros(4, frames or length))


def feature(**changes):
    place = SimpleNamespace(**{"offset": 2, "length": 3, "is_embed": None, **changes.pop("place", {})})
    place.get_num_embeds = lambda: place.length if place.is_embed is None else int(place.is_embed.sum())
    defaults = {"modality": "image", "mm_position": place, "data": pixels(1, 2, 6), "identifier": "x"}
    return SimpleNamespace(**{**defaults, **changes})


def test_features_must_lie_inside_the_prompt():
    audio_embeddings = Qwen2_5OmniThinkerAdapter.audio_embeddings
    check_feature(feature(), 5, merged_patches(2), audio_embeddings)
    whole = feature(place={"is_embed": torch.ones(3, dtype=torch.bool)})
    check_feature(whole, 5, merged_patches(2), audio_embeddings)
    check_feature(feature(data=audio(12), modality="audio"), 5, merged_patches(2), audio_embeddings)
    bad = [
        feature(modality="smell"),
        feature(data=None),
        feature(data={}),
        feature(data=pixels(2, 2, 4)),
        feature(data=pixels(1, 2, 6, patches=11)),
        feature(data=pixels(3, 1, 4)),
        feature(data=pixels(-1, -2, 6)),
        feature(data=pixels(1, 2, 6), modality="video"),
        feature(data=audio(13), modality="image"),
        feature(data=audio(20), modality="audio"),
        feature(data=audio(12, frames=13), modality="audio"),
        feature(data=audio(0), modality="audio"),
        feature(identifier=""),
        feature(place={"offset": -1}),
        feature(place={"length": 0}),
        feature(place={"length": 4}),
        feature(place={"is_embed": torch.ones(2, dtype=torch.bool)}),
        feature(place={"is_embed": torch.ones(3)}),
    ]
    for case in bad:
        with pytest.raises(InvalidPayload):
            check_feature(case, 5, merged_patches(2), audio_embeddings)


@pytest.mark.parametrize(("count", "ends"), [(30, False), (24, False), (24, True), (5, True), (1, True)])
def test_codec_tokens_leave_by_blocks_of_the_vocoder(count: int, ends: bool) -> None:
    outputs = CodecOutputs("r", frozenset({END}), 12)
    events = []
    for index in range(count):
        last = index == count - 1
        reason = (FinishReason.STOP if ends else FinishReason.LENGTH) if last else None
        token = END if last and ends else index
        events += outputs.convert(EngineCoreOutput("r", [token], finish_reason=reason))
    spoken = count - ends
    assert [token for event in events for token in event.token_ids] == list(range(spoken))
    assert [event.start for event in events] == list(range(0, max(spoken, 1), 12))[: len(events)] or spoken % 12 == 0
    assert [event.final for event in events] == [False] * (len(events) - 1) + [True]
    assert all(len(event.token_ids) == 12 for event in events[:-1])


def test_a_checkpoint_without_a_talker_says_what_to_do():
    empty = PretrainedConfig()
    assert SPEC.hf_overrides(empty) is empty
    for parts in ({}, {"talker_config": None}, {"talker_config": object(), "enable_audio_output": False}):
        with pytest.raises(ConfigError, match="has no talker") as refused:
            SPEC.hf_overrides(PretrainedConfig(thinker_config=PretrainedConfig(), **parts))
        assert "Leave the stages after the thinker out" in (refused.value.hint or "")


def test_grammars_are_compiled_at_the_lowest_priority_and_so_is_what_their_thread_starts() -> None:
    seen: list[int] = []

    def note() -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def work() -> None:
        note()
        thread = threading.Thread(target=note)
        thread.start()
        thread.join()

    config: Any = None  # of no request with a grammar
    request: Any = type("Request", (), {"sampling_params": type("Params", (), {"structured_outputs": None})})
    prepared: Any = type("Prepared", (), {"structured_output_request": None})
    compiler = GrammarCompiler(config, lambda _: (prepared, 0), lambda: None)
    compiler.start(request, work)
    (done,) = compiler.take(10)
    compiler.close()
    note()
    assert done.error is None
    assert seen == [19, 19, os.getpriority(os.PRIO_PROCESS, 0)] != [19, 19, 19]


@pytest.mark.parametrize(
    ("result", "message"),
    [
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
