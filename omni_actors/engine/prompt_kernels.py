"""Which batches of prompts compile kernels that nothing else compiles at a stage's start.

Batches up to the largest CUDA graph are padded to the size of a graph, and run when it is captured. Larger ones run as
they are. Triton compiles another kernel for each combination of settings, which vLLM chooses for a model's experts by
the number of tokens (from tables of what is fastest on a GPU), and for numbers that are or are not multiples of 16.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

_SPECIAL = 16  # Triton has code of its own for multiples of this


@dataclass(frozen=True)
class Experts:
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
