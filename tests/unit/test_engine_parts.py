"""The pure parts of the engine package: tensors, sampling parameters, models, joined outputs."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_actors.engine import models
from omni_actors.engine.core import StepFailed, device_is_lost
from omni_actors.engine.encoded_requests import check_feature, merged_patches
from omni_actors.engine.models import CHAT, checkpoint_architecture, find_model_spec, load_plugins
from omni_actors.engine.models.qwen2_5_omni.thinker import Qwen2_5OmniThinkerAdapter
from omni_actors.engine.rows import check_rows, to_host, to_torch
from omni_actors.engine.sampling import GrammarCompiler, check_prompt_logprobs, make_sampling_params
from omni_actors.errors import ConfigError, InvalidPayload, InvalidRequest
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.protocol.payloads import StageParams
from omni_actors.stage.engine_interface import EngineLost

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


# ---------------------------------------------------------------------------------------------------------------------
# Sampling parameters


def make(params: StageParams, **options):
    return make_sampling_params(params, **{"seed": 7, "end_token_ids": [3, 2], "vocabulary": 10, **options})


def test_sampling_carries_what_is_given():
    made = make(
        StageParams(
            max_tokens=5,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=4,
            min_p=0.1,
            stop_token_ids=(9, 3),
            allowed_token_ids=(1, 2),
        ),
        payload="payload",
        read_prefix_cache=False,
    )
    assert made.min_tokens == 2
    assert made.temperature == 0.5
    assert made.top_p == 0.9
    assert made.top_k == 4
    assert made.min_p == 0.1
    assert made.stop_token_ids == [2, 3, 9]
    assert made.allowed_token_ids == [1, 2], "a list, as vLLM wants it"
    assert made.extra_args == {"omni": "payload"}
    assert made.skip_reading_prefix_cache


def test_ignoring_the_end_keeps_the_requests_own_stops():
    assert make(StageParams(max_tokens=5, ignore_eos=True, stop_token_ids=(9,))).stop_token_ids == [9]


@pytest.mark.parametrize(
    "params",
    [
        StageParams(max_tokens=5, num_steps=3),
        StageParams(max_tokens=5, stop_token_ids=(10,)),
        StageParams(max_tokens=5, min_tokens=6),
        StageParams(max_tokens=5, temperature=99.0),
        StageParams(max_tokens=0),  # for stages with text
    ],
)
def test_wrong_parameters_are_the_callers_fault(params):
    with pytest.raises(InvalidRequest):
        make(params)


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


def test_a_plugin_brings_models(plugin):
    plugin("{('OwnModel', 'thinker'): 'plugin_of_test.own'}")
    assert find_model_spec("OwnModel", "thinker").kind == "diffusion"
    load_plugins(["plugin_of_test"])  # as a restarted stage in the same fork server would
    with pytest.raises(ConfigError, match=r"its stages are \['thinker'\]"):
        find_model_spec("OwnModel", "talker")


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
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine import FinishReason as VllmFinishReason

    from omni_actors.engine.models.code_talker import CodecOutputs

    end = 99
    outputs = CodecOutputs("r", frozenset({end}), 12)
    events = []
    for index in range(count):
        last = index == count - 1
        reason = (VllmFinishReason.STOP if ends else VllmFinishReason.LENGTH) if last else None
        token = end if last and ends else index
        events += outputs.convert(EngineCoreOutput("r", [token], finish_reason=reason))
    spoken = count - ends
    assert [token for event in events for token in event.token_ids] == list(range(spoken))
    assert [event.start for event in events] == list(range(0, max(spoken, 1), 12))[: len(events)] or spoken % 12 == 0
    assert [event.final for event in events] == [False] * (len(events) - 1) + [True]
    assert all(len(event.token_ids) == 12 for event in events[:-1])


def test_a_checkpoint_without_a_talker_says_what_to_do():
    from transformers import PretrainedConfig

    from omni_actors.engine.models.qwen3_omni.talker import SPEC

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
    compiler = GrammarCompiler(config, lambda _: (prepared, 0))
    compiler.start(request, work)
    (done,) = compiler.take(10)
    compiler.close()
    note()
    assert done.error is None
    assert seen == [19, 19, os.getpriority(os.PRIO_PROCESS, 0)] != [19, 19, 19]
