"""Repetition-aware sampling, by which S3 tokens are drawn.

A token comes from the likeliest ones, unless it is among the last ten: then any other token takes its place, each as
likely as the model has it. Here this is one distribution, from which vLLM draws with the seed of the request.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor, LogitsProcRequestState

WINDOW = 10  # tokens
SMALLEST = 1e-30  # chance of all other tokens


class Nucleus(NamedTuple):
    """The likeliest tokens: as many as have `top_p` together, at most `top_k`."""

    top_p: float
    top_k: int


def repetition_aware(
    logits: torch.Tensor, recent: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """Logarithms of the chances with which tokens are drawn, f32 [n, vocabulary].

    Args:
        logits: [n, vocabulary].
        recent: i64 [n, WINDOW], the last tokens; -1 where there are none.
        top_p: f64 [n]; `top_k` i64 [n].
    """
    chances = logits.double().softmax(-1)
    ordered, order = chances.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    kept = (ordered.cumsum(-1) - ordered < top_p[:, None]) & (places < top_k[:, None])
    nucleus = torch.zeros_like(chances).scatter(-1, order, ordered * kept)
    nucleus /= nucleus.sum(-1, keepdim=True)
    known = recent >= 0
    repeated = torch.zeros_like(chances).scatter_add(-1, recent.clamp(min=0), known.double()) > 0
    # What each token that would repeat leaves to any other one.
    left = nucleus * repeated / (1 - chances).clamp(min=SMALLEST)
    drawn = nucleus * ~repeated + chances * (left.sum(-1, keepdim=True) - left).clamp(min=0)
    return drawn.log().float()


class RepetitionAware(LogitsProcessor):
    """Applies it to requests that have a `Nucleus` as their payload and are not greedy."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        self._nuclei: list[Nucleus | None] = [None] * req_states.max_num_reqs

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """See `LogitsProcessor`."""
        payload = (sampling_params.extra_args or {}).get("omni")
        self._nuclei[req_idx] = payload if isinstance(payload, Nucleus) and sampling_params.temperature > 0 else None
        return self._nuclei[req_idx] is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """See `LogitsProcessor`."""
        nuclei = [self._nuclei[slot] for slot in ctx.idx_mapping_np.tolist()]
        drawn = [(row, nucleus) for row, nucleus in enumerate(nuclei) if nucleus is not None]
        if not drawn:
            return logits
        device = logits.device
        rows = async_tensor_h2d([row for row, _ in drawn], device=device, dtype=torch.int64)
        slots = ctx.idx_mapping[rows].long()[:, None]
        places = self._states.total_len.gpu[slots] - torch.arange(1, WINDOW + 1, device=device)
        tokens = self._states.all_token_ids.gpu[slots, places.clamp(min=0)].long()
        recent = torch.where(places >= self._states.prompt_len.gpu[slots], tokens, -1)
        top_p = async_tensor_h2d([nucleus.top_p for _, nucleus in drawn], device=device, dtype=torch.float64)
        top_k = async_tensor_h2d([nucleus.top_k for _, nucleus in drawn], device=device, dtype=torch.int64)
        logits[rows] = repetition_aware(logits[rows], recent, top_p, top_k)
        return logits
