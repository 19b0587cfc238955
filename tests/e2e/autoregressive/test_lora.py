"""LoRA adapters of the thinker: each request its own, equal to a model with the adapter's weights merged in."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig, engine_arguments, lora_requests
from omni_actors.engine.autoregressive import AutoregressiveEngine
from omni_actors.errors import ConfigError, InvalidRequest
from omni_actors.vllm_version import Platform
from tests.support.reference import Reference
from tests.support.stage_driver import SMALL, Driver, prompt_length, token_inputs

pytestmark = pytest.mark.e2e
RANK, ALPHA = 8, 16
MODULES = ("self_attn.q_proj", "mlp.down_proj")


def weights(reference: Reference, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each adapted module of the thinker, by its name in transformers' model."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, module in reference.model.thinker.model.named_modules():
        if name.endswith(MODULES):
            outputs, inputs = module.weight.shape
            a = torch.randn(RANK, inputs, generator=random) * 0.1
            made[f"thinker.model.{name}"] = (a, torch.randn(outputs, RANK, generator=random) * 0.1)
    return made


def write_adapter(folder: Path, reference: Reference, seed: int, rank: object = RANK) -> Path:
    """An adapter of random weights."""
    folder.mkdir()
    tensors = {}
    for name, (a, b) in weights(reference, seed).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none", "task_type": "CAUSAL_LM"}
    config["target_modules"] = [name.split(".")[-1] for name in MODULES]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def merged(reference: Reference, seed: int) -> Iterator[None]:
    """transformers' model with an adapter's weights merged into its own."""
    changed = []
    for name, (a, b) in weights(reference, seed).items():
        weight = reference.model.get_submodule(name).weight
        changed.append((weight, weight.detach().clone()))
        weight.data += b @ a * (ALPHA / RANK)
    try:
        yield
    finally:
        for weight, original in changed:
            weight.data.copy_(original)


@pytest.fixture(scope="module")
def folders(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(write_adapter(folder / name, reference, seed)) for seed, name in enumerate(("pirate", "poet"))}


def test_requests_of_one_batch_have_the_model_that_they_name(folders, answers, reference, tiny_checkpoint):
    expected = {None: answers[1]}
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    for seed, name in enumerate(folders):
        with merged(reference, seed):
            expected[name] = reference.generate(reference.inputs(messages), speaks=False)
    assert len({tuple(answer.thinker_tokens) for answer in expected.values()}) == 3
    model = OmniModelConfig(str(tiny_checkpoint), "thinker", adapters=folders)
    engine = AutoregressiveEngine(OmniEngineArgs(model, "autoregressive", {**SMALL, "block_size": 32}))
    driver = Driver(engine)
    for turn in range(2):  # the second finds its prompt in the prefix cache, where each model has its own
        for name, answer in expected.items():
            params = {} if name is None else {"adapter": name}
            driver.start(f"{name} {turn}", token_inputs(answer.prompt_token_ids), max_tokens=12, **params)
        driver.run()
        for name, answer in expected.items():
            assert driver.tokens(f"{name} {turn}") == answer.thinker_tokens[:12]
            rows = answer.thinker_rows[: prompt_length(answer) + 11]
            torch.testing.assert_close(driver.rows(f"{name} {turn}"), rows, atol=1e-4, rtol=1e-4)
    with pytest.raises(InvalidRequest, match=r"no adapter 'pirat'\. Did you mean 'pirate'") as caught:
        driver.start("wrong", token_inputs([1, 2]), adapter="pirat")
    assert caught.value.field == "adapter"
    driver.assert_idle()
    engine.shutdown()


def test_vllm_reserves_what_the_adapters_need(folders, reference, tmp_path):
    assert engine_arguments({}, Platform.CUDA) == {}
    small = {"enable_lora": True, "max_lora_rank": 8}
    assert engine_arguments(folders, Platform.CUDA) == {**small, "max_loras": 2, "max_cpu_loras": 2}
    assert engine_arguments(folders, Platform.CPU) == {**small, "max_loras": 3, "max_cpu_loras": 3}
    write_adapter(tmp_path / "large", reference, 0, rank=40)
    many = {f"a{index}": str(tmp_path / "large") for index in range(20)}
    large = {"enable_lora": True, "max_lora_rank": 64}
    assert engine_arguments(many, Platform.CUDA) == {**large, "max_loras": 8, "max_cpu_loras": 20}
    assert [adapter.lora_int_id for adapter in lora_requests(many).values()] == list(range(1, 21))


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "holds no LoRA adapter"), ("{", "holds no LoRA adapter"), ('{"r": 4000}', "its rank is 4000")],
)
def test_a_folder_without_an_adapter_is_refused(tmp_path, content, says):
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        engine_arguments({"pirate": str(tmp_path)}, Platform.CUDA)
    assert "adapters.pirate" in str(caught.value)
