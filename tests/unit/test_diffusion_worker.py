"""The diffusion worker without an engine: the outputs of a step, and what it refuses to load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from omni_actors.engine.workers.diffusion import FAILED_TOKEN, STEP_TOKEN, DiffusionOutput, DiffusionWorker, StepResult
from omni_actors.errors import ConfigError, EngineError

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
