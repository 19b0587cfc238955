"""Which batches of prompts a start runs so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from vllm.model_executor.layers.fused_moe import fused_moe

from omni_actors.engine.workers.gpu import Experts, prompt_sizes

GRAPHS = [1, 2, 4, *range(8, 257, 8)]
THINKER = Experts((128, 1536, 2048), (128, 2048, 768), 8)
TALKER = Experts((128, 768, 1024), (128, 1024, 384), 6)
Tuned = Callable[[str], None]


@pytest.fixture
def tuned_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuned]:
    """Has vLLM look for its tables of a device; of a name that it does not know, it takes its defaults."""

    def use(device: str) -> None:
        fused_moe.get_moe_configs.cache_clear()
        monkeypatch.setattr(
            fused_moe,
            "get_config_file_name",
            lambda experts, width, *_: f"E={experts},N={width},device_name={device}.json",
        )

    yield use
    fused_moe.get_moe_configs.cache_clear()


def all_kernels(kinds: list[Experts], sizes: range | list[int]) -> set[object]:
    return {kind.kernels(size) for kind in kinds for size in sizes}


@pytest.mark.parametrize(
    ("kind", "graphs", "largest"), [(THINKER, GRAPHS, 2048), (TALKER, GRAPHS[:19], 4096)], ids=["thinker", "talker"]
)
@pytest.mark.parametrize("device", ["NVIDIA_H200", "one that nobody has tuned"])
def test_every_kernel_that_a_prompt_can_need_is_compiled_once(
    kind: Experts, graphs: list[int], largest: int, device: str, tuned_for: Tuned
) -> None:
    tuned_for(device)
    sizes = prompt_sizes([kind], graphs, largest)
    begun = [*graphs, largest]
    assert all_kernels([kind], [*begun, *sizes]) == all_kernels([kind], [*graphs, *range(graphs[-1], largest + 1)])
    for size in sizes:
        assert graphs[-1] < size < largest
        assert kind.kernels(size) not in all_kernels([kind], [*begun, *(other for other in sizes if other < size)])


def test_several_kinds_of_experts_share_their_sizes(tuned_for: Tuned) -> None:
    tuned_for("NVIDIA_H200")
    kinds = [THINKER, TALKER]
    sizes = prompt_sizes(kinds, GRAPHS, 2048)
    assert all_kernels(kinds, [*GRAPHS, 2048, *sizes]) == all_kernels(kinds, [*GRAPHS, *range(256, 2049)])
    assert len(sizes) < len(prompt_sizes([THINKER], GRAPHS, 2048)) + len(prompt_sizes([TALKER], GRAPHS, 2048))


def test_a_batch_that_fits_a_graph_needs_nothing(tuned_for: Tuned) -> None:
    tuned_for("NVIDIA_H200")
    assert prompt_sizes([THINKER], GRAPHS, 256) == []
