"""The code predictor of speech models: a small transformer that completes a frame whose first code is known.

A frame is a code of each of G groups. The talker samples the first; the predictor reads the talker's state and that
code's embedding and adds the others, one pass a group, each with its own head and embedding table. Passes are small and
many, so what they cost on a GPU is launching kernels: `GraphedPredictor` replays all passes of a frame as one CUDA
graph. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from omni_actors.engine.models import fused_predictor
from omni_actors.engine.models.cuda_graphs import CudaGraphs

_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class PredictorConfig:
    """Sizes, and the sampling that the published models use for every group but the first.

    Args:
        input_size: width of the talker's states and of the code embeddings; projected to `hidden_size` if it differs.
    """

    groups: int
    vocab_size: int
    input_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float = 1e-6
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.8

    @classmethod
    def of(cls, config: Any, input_size: int, **sampling: Any) -> PredictorConfig:
        """From the `code_predictor_config` of a checkpoint."""
        return cls(
            groups=config.num_code_groups,
            vocab_size=config.vocab_size,
            input_size=input_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_parameters["rope_theta"],
            eps=config.rms_norm_eps,
            **sampling,
        )


class PredictorLayer(nn.Module):
    """A decoder layer with its projections joined. Norms and rotations are the only operations in float32."""

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.config = config
        hidden, size = config.hidden_size, config.head_dim
        rotated = config.heads + config.kv_heads  # heads of queries and keys
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, (rotated + config.kv_heads) * size, bias=False)
        self.qk_norm = nn.Parameter(torch.ones(rotated, size))
        self.o = nn.Linear(config.heads * size, hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, start: int
    ) -> torch.Tensor:
        """States [B, n, H] of n positions from `start` on.

        Args:
            cos: [n, 1, head_dim], as `sin`, whose first half has the opposite sign.
            cache: keys and values [2, B, kv_heads, positions, head_dim]; those of the new positions are written.
        """
        config, (batch, n, _) = self.config, x.shape
        y = F.rms_norm(x, x.shape[-1:], self.input_norm, config.eps)
        qkv = self.qkv(y).view(batch, n, -1, config.head_dim)
        qk = F.rms_norm(qkv[..., : -config.kv_heads, :].float(), (config.head_dim,), None, config.eps) * self.qk_norm
        turned = qk.roll(config.head_dim // 2, dims=-1)
        qk = torch.addcmul(qk * cos, turned, sin).to(x.dtype).transpose(1, 2)
        end = start + n
        cache[0, :, :, start:end] = qk[:, config.heads :]
        cache[1, :, :, start:end] = qkv[..., -config.kv_heads :, :].transpose(1, 2)
        keys, values = cache[0, :, :, :end], cache[1, :, :, :end]
        queries = qk[:, : config.heads]
        if n == 1:  # the heads that share keys as the positions of one head: all see the same
            shared = queries.reshape(batch, config.kv_heads, -1, config.head_dim)
            seen = F.scaled_dot_product_attention(shared, keys, values)
        else:
            gqa = config.heads != config.kv_heads
            seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=gqa).transpose(1, 2)
        x = x + self.o(seen.reshape(batch, n, -1))
        gate, up = self.gate_up(F.rms_norm(x, x.shape[-1:], self.mlp_norm, config.eps)).chunk(2, dim=-1)
        out: torch.Tensor = x + self.down(F.silu(gate) * up)
        return out


class CodePredictor(nn.Module):
    """Completes frames. Equal requests get equal codes, whatever else is in their batch.

    Attributes:
        fused: whether small batches on a GPU take the few kernels of `fused_predictor` instead of torch's many.
    """

    fused = True
    cos: torch.Tensor
    sin: torch.Tensor
    group_numbers: torch.Tensor
    code_numbers: torch.Tensor

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.config = config
        residual = config.groups - 1
        self.embeddings = nn.Parameter(torch.empty(residual, config.vocab_size, config.input_size))
        self.heads = nn.Parameter(torch.empty(residual, config.vocab_size, config.hidden_size))
        self.projection = (
            nn.Linear(config.input_size, config.hidden_size) if config.input_size != config.hidden_size else None
        )
        self.layers = nn.ModuleList(PredictorLayer(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(config.groups, dtype=torch.float32), config.rope_theta**-exponents)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [positions, 1, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        sign = torch.ones(config.head_dim)
        sign[: config.head_dim // 2] = -1
        self.register_buffer("sin", angles.sin() * sign, persistent=False)
        self.register_buffer("group_numbers", torch.arange(residual), persistent=False)
        self.register_buffer("code_numbers", torch.arange(config.vocab_size), persistent=False)

    def forward(
        self, hidden: torch.Tensor, first: torch.Tensor, seeds: torch.Tensor, frames: torch.Tensor, greedy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual codes i64 [B, G - 1], and the sum of the embeddings of all codes of each frame [B, E].

        Args:
            hidden: the talker's states [B, E], after its norm, from which the first codes were sampled.
            first: embeddings [B, E] of the first codes.
            seeds: of the requests, i64 [B]; with `frames`, the number of the frame i64 [B], they decide the draw.
            greedy: bool [B], take the likeliest code.
        """
        config = self.config
        if self.fused and hidden.is_cuda and fused_predictor.fits(config, len(hidden)):
            return fused_predictor.complete(self, hidden, first, seeds, frames, greedy)
        cache = hidden.new_empty(
            config.layers, 2, len(hidden), config.kv_heads, config.groups, config.head_dim, dtype=self.norm.dtype
        )
        noise = self.noise(seeds, frames)
        x = torch.stack((hidden, first), dim=1)
        total, codes, start = first.float(), [], 0
        for group in range(config.groups - 1):
            if self.projection is not None:
                x = self.projection(x)
            end = start + x.shape[1]
            for index, layer in enumerate(self.layers):
                x = layer(x, self.cos[start:end], self.sin[start:end], cache[index], start)
            x = F.rms_norm(x[:, -1], x.shape[-1:], self.norm, config.eps)
            code = self.sample(F.linear(x, self.heads[group]).float(), noise[:, group], greedy)
            codes.append(code)
            x = self.embeddings[group][code].unsqueeze(1)
            total = total + x[:, 0]
            start = end
        return torch.stack(codes, dim=1), total.to(first.dtype)

    def embed(self, codes: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Sums [n, E] of the embeddings of known frames: residual codes i64 [n, G - 1], first embeddings [n, E]."""
        total = first.float()
        for group in range(self.config.groups - 1):  # in the order of `forward`, so that the sums are the same
            total = total + self.embeddings[group][codes[:, group]]
        return total.to(first.dtype)

    def noise(self, seeds: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """The noise of all draws of frames, f32 [B, G - 1, vocabulary]: for all groups at once, which saves kernels."""
        return gumbel_noise(seeds, frames, self.group_numbers, self.code_numbers)

    def sample(self, logits: torch.Tensor, noise: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
        """Codes i64 [B] of logits and noise f32 [B, vocabulary]: top-k, then top-p, then the largest with its noise."""
        config = self.config
        scaled = logits if config.temperature == 1 else logits / config.temperature
        values, tokens = scaled.topk(min(config.top_k, config.vocab_size), dim=-1)
        probabilities = values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities  # of likelier codes; 0 for the likeliest
        noisy = values + noise.gather(1, tokens)
        drawn = tokens.gather(1, noisy.masked_fill(before >= config.top_p, -torch.inf).argmax(dim=-1, keepdim=True))
        return torch.where(greedy, logits.argmax(dim=-1), drawn[:, 0])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's tensors, named as in transformers; return the names of the parameters that were set.

        Raises:
            KeyError: a name is unknown.
        """
        views, filled = self._views(), set()
        for name, weight in weights:
            view = views[name.removeprefix("model.")]
            view.copy_(weight.expand_as(view))
            filled.add(view.untyped_storage().data_ptr())
        parameters = self.named_parameters()
        return {name for name, parameter in parameters if parameter.untyped_storage().data_ptr() in filled}

    def _views(self) -> dict[str, torch.Tensor]:
        """What each of a checkpoint's tensors goes to."""
        config, views = self.config, {"norm.weight": self.norm.data}
        for group in range(config.groups - 1):
            views[f"codec_embedding.{group}.weight"] = self.embeddings.data[group]
            views[f"lm_head.{group}.weight"] = self.heads.data[group]
        if self.projection is not None:
            for name, parameter in self.projection.named_parameters():
                views[f"small_to_mtp_projection.{name}"] = parameter.data
        for index, layer in enumerate(cast("Iterable[PredictorLayer]", self.layers)):
            heads = (config.heads, config.kv_heads, config.kv_heads)
            query, key, value = layer.qkv.weight.data.split([config.head_dim * count for count in heads])
            gate, up = layer.gate_up.weight.data.chunk(2)
            query_norm, key_norm = layer.qk_norm.data.split(heads[:2])
            own = {
                "input_layernorm": layer.input_norm.data,
                "post_attention_layernorm": layer.mlp_norm.data,
                "self_attn.q_proj": query,
                "self_attn.k_proj": key,
                "self_attn.v_proj": value,
                "self_attn.q_norm": query_norm,
                "self_attn.k_norm": key_norm,
                "self_attn.o_proj": layer.o.weight.data,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": layer.down.weight.data,
            }
            views |= {f"layers.{index}.{name}.weight": view for name, view in own.items()}
        return views


def _scrambled(x: torch.Tensor) -> torch.Tensor:
    """A hash of 32 bits for every integer of 32 bits, in i64: products overflow, their lower bits are right."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def gumbel_noise(seeds: torch.Tensor, frames: torch.Tensor, groups: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Gumbel noise f32 [B, groups, codes] that depends only on (seed, frame, group, code).

    Args:
        seeds: i64 [B], as `frames`.
        groups: i64, numbers of groups.
        codes: i64, numbers of codes.
    """
    key = _scrambled(seeds & _MASK32)
    for part in ((seeds >> 32) & _MASK32, frames & _MASK32):
        key = _scrambled(key ^ part)
    key = _scrambled(key.unsqueeze(1) ^ groups)
    bits = _scrambled(key.unsqueeze(2) ^ _scrambled(codes))
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24
    return -(-uniform.log()).log()


class GraphedPredictor:
    """A predictor with one CUDA graph for each of some batch sizes; without graphs it runs eagerly.

    Args:
        largest: number of frames that may be completed at a time.
    """

    def __init__(self, predictor: CodePredictor, largest: int, dtype: torch.dtype, device: torch.device) -> None:
        self.predictor = predictor
        rows = torch.zeros(2, largest, predictor.config.input_size, dtype=dtype, device=device)
        numbers = torch.zeros(2, largest, dtype=torch.int64, device=device)
        self._inputs = (*rows, *numbers, torch.zeros(largest, dtype=torch.bool, device=device))
        self._graphs: CudaGraphs[int, tuple[torch.Tensor, torch.Tensor]] = CudaGraphs()

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture a graph for each batch size."""
        for size in sorted(sizes, reverse=True):
            self._graphs.capture(size, partial(self.predictor, *(tensor[:size] for tensor in self._inputs)))

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`CodePredictor.forward`. The next call may overwrite the results."""
        count = len(inputs[0])
        size = min((size for size in self._graphs.tensors if size >= count), default=None)
        if size is None:
            codes, total = self.predictor(*inputs)
            return codes, total
        for static, given in zip(self._inputs, inputs, strict=True):
            static[:count].copy_(given)
        codes, total = self._graphs.replay(size)
        return codes[:count], total[:count]


def batch_sizes(largest: int) -> list[int]:
    """Batch sizes to capture: finer where padding costs most, always with `largest`."""
    sizes = [size for size in (1, 2, 4, 8, *range(16, 65, 16), *range(128, 1025, 64)) if size < largest]
    return [*sizes, largest]
