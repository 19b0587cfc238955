"""Worker and runner of autoregressive stages on CUDA.

Batches up to the largest CUDA graph are padded to the size of a graph, and run when it is captured. Larger ones run as
they are. Triton compiles another kernel for each combination of settings, which vLLM chooses for a model's experts by
the number of tokens (from tables of what is fastest on a GPU), and for numbers that are or are not multiples of 16.

A CUDA process must never import `cpu.py` (which says why). This module can be imported anywhere and touches no device
until the worker is made.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.nn import functional
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from omni_actors.engine.platform import wait_for_memory
from omni_actors.engine.workers.base import OmniWorkerBase
from omni_actors.engine.workers.runner import OmniRunnerMixin
from omni_actors.envs import MPS_SHARE
from omni_actors.errors import ConfigError, StartupError

_SPECIAL = 16  # Triton has code of its own for multiples of this


class Experts(Struct, frozen=True):
    """What the kernels of a layer of experts depend on, besides the number of tokens.

    Args:
        w13: shape of the first product's weights, as `w2` of the second's.
        chosen: experts per token.
        quantisation: vLLM's name for it; None for weights of 16 or 32 bits.
        block_shape: of weights that are quantised in blocks.
    """

    w13: tuple[int, ...]
    w2: tuple[int, ...]
    chosen: int
    quantisation: str | None = None
    block_shape: tuple[int, ...] | None = None

    def kernels(self, tokens: int) -> Hashable:
        """What is equal for numbers of tokens that take the same kernels."""
        block_shape = list(self.block_shape) if self.block_shape else None
        config = try_get_optimal_moe_config(self.w13, self.w2, self.chosen, self.quantisation, tokens, block_shape)
        return self, tuple(sorted(config.items())), tokens * self.chosen % _SPECIAL == 0


def experts_of(model: nn.Module) -> set[Experts]:
    """The kinds of layers of experts that a model has."""
    found = set()
    for module in model.modules():
        if not isinstance(module, RoutedExperts):
            continue
        quantised = module.quant_method.moe_quant_config
        block_shape = quantised.block_shape if quantised is not None else None
        kind = Experts(
            tuple(module.get_parameter("w13_weight").shape),
            tuple(module.get_parameter("w2_weight").shape),
            module.moe_config.experts_per_token,
            quantised.config_name(module.params_dtype) if quantised is not None else None,
            tuple(block_shape) if block_shape else None,
        )
        found.add(kind)
    return found


def prompt_sizes(kinds: Iterable[Experts], captured: Sequence[int], largest: int) -> list[int]:
    """Numbers of tokens, in order, that take all kernels which no other batch of a start takes.

    Args:
        captured: sizes of the CUDA graphs.
        largest: tokens of the largest batch, which runs when memory is measured.
    """
    layers = list(kinds)

    def kernels(tokens: int) -> set[Hashable]:
        return {tokens % _SPECIAL == 0, *(layer.kernels(tokens) for layer in layers)}

    known = kernels(largest).union(*(kernels(size) for size in captured))
    sizes = []
    for tokens in range(max(captured, default=1) + 1, largest):
        if new := kernels(tokens) - known:
            sizes.append(tokens)
            known |= new
    return sizes


PRODUCT_ROWS = (1, 8, 32, 64, 256)
PRODUCT_ERROR = 0.03  # of the largest value; that of bfloat16 is 0.004
GIB = 1 << 30
OUTSIDE_TORCH_BYTES = 2 * GIB  # CUDA context, cuBLAS and captured graphs of one process


class OmniGPURunner(OmniRunnerMixin, GPUModelRunner):
    """vLLM's V2 runner with rows in and out."""


class OmniGPUWorker(OmniWorkerBase, Worker):
    """vLLM's worker with our runner, and a KV cache sized by this process's own memory use."""

    # Declared for the V1 runner; vLLM returns its V2 runner from it just so.
    def _make_model_runner(self) -> OmniGPURunner:  # type: ignore[override]
        return OmniGPURunner(self.vllm_config, self.device)  # type: ignore[arg-type]

    def init_device(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `init_device`, once the device has room: what a killed process held is released some time later."""
        wait_for_memory(lambda: torch.cuda.mem_get_info(self.local_rank), self.cache_config.gpu_memory_utilization)
        return super().init_device(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's `load_model`; under MPS with a part of the GPU, also check that its products are right there."""
        loaded = super().load_model(*args, **kwargs)
        if MPS_SHARE in os.environ:
            check_products(self.get_model())
        return loaded

    def omni_prompt_sizes(self) -> list[int]:
        """Numbers of tokens of prompts whose kernels neither a graph nor the memory's profile has compiled."""
        if self.vllm_config.lora_config is not None:
            return []  # a run without requests drops all adapters
        compilation = self.vllm_config.compilation_config
        padded = compilation.cudagraph_mode.mixed_mode() is not CUDAGraphMode.NONE  # to the sizes of graphs
        captured = compilation.cudagraph_capture_sizes if padded else None
        largest = self.vllm_config.scheduler_config.max_num_batched_tokens
        return prompt_sizes(experts_of(self.get_model()), captured or (), largest)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: the stage's share of the device minus this process's own peak.

        vLLM compares the free memory of the whole device before and after its profile run, so stages that load on one
        GPU at the same time would be charged for each other. torch's statistics count this process alone: no lock is
        needed, and the stages profile in parallel.
        """
        cache = self.cache_config
        if cache.kv_cache_memory_bytes is not None:
            return super().determine_available_memory()
        share = int(self.requested_memory)
        torch.cuda.reset_peak_memory_stats()
        cache.kv_cache_memory_bytes = share  # vLLM then runs the profile without measuring the device
        super().determine_available_memory()
        torch.cuda.empty_cache()
        left = kv_cache_bytes(share, torch.cuda.max_memory_allocated(), cache.gpu_memory_utilization)
        cache.kv_cache_memory_bytes = left
        return left


def check_products(model: nn.Module) -> None:
    """Check products of a model's weights on this part of a GPU against float32, a kind of weight at a time.

    On Hopper cuBLAS 13.1 gives wrong sums, and at times NaN, on 18 to 28, 38 to 58 and 78 of 132 multiprocessors, but
    not on 12, 14, 30 to 34 or 66 (docs/benchmarks.md).

    Raises:
        StartupError: a product is wrong.
    """
    weights = {tuple(weight.shape): weight for weight in model.parameters() if weight.dim() == 2}
    for (outputs, inputs), weight in weights.items():
        if weight.dtype not in (torch.bfloat16, torch.float16):
            continue
        some = slice(None, None, max(1, outputs // 256))  # outputs to compare: each tile of a product has several
        exact = weight[some].float()
        for rows in PRODUCT_ROWS:
            given = torch.randn(rows, inputs, device=weight.device, dtype=weight.dtype)
            expected = functional.linear(given.float(), exact)
            error = functional.linear(given, weight)[:, some].float() - expected
            if not error.abs().max() <= PRODUCT_ERROR * expected.abs().max():
                raise StartupError(
                    f"On the part of the GPU that this stage has, its library computes a product of {rows} x {inputs} "
                    f"by {inputs} x {outputs} wrongly.",
                    hint="Give the stage another number of multiprocessors (32 is right on Hopper), or none.",
                )


def kv_cache_bytes(share: int, peak: int, utilization: float) -> int:
    """Bytes that a stage's share of a GPU leaves for the KV cache.

    Args:
        share: bytes of the GPU that the stage may use.
        peak: bytes that torch allocated at most while the model was loaded and ran its largest batch.
        utilization: the setting that `share` comes from, for the message.

    Raises:
        ConfigError: the share leaves nothing.
    """
    own = peak + OUTSIDE_TORCH_BYTES
    if share <= own:
        raise ConfigError(
            f"gpu_memory_utilization {utilization:g} is {share / GIB:.1f} GiB of this GPU; the "
            f"model alone takes {own / GIB:.1f} GiB, which leaves nothing for the KV cache.",
            hint="Raise gpu_memory_utilization of this stage, or lower max_num_batched_tokens.",
        )
    return share - own
