"""vLLM's sampling of decode steps as CUDA graphs: twenty to thirty launches become one.

A graph holds for a number of rows and for a set of kernels; which kernels vLLM launches depends on whether any request
of the batch has penalties, top-k and so on. What requests differ in are numbers in memory. vLLM writes them to another
of two host buffers in every step, so the graphs read copies on the device, renewed when requests come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler

logger = logging.getLogger(__name__)

MOST_GRAPHS = 128
Sample = Callable[[torch.Tensor, InputBatch], SamplerOutput]  # by vLLM's own kernels, one by one
Recorded = tuple[Callable[[], None], SamplerOutput]


class SamplingGraphs:
    """Graphs of a runner's sampling, captured when a kind of batch comes for the second time.

    Args:
        runner: a runner for which `can_graph` holds.
        sample: what is captured.
    """

    def __init__(self, runner: GPUModelRunner, sample: Sample) -> None:
        self.stale = True  # whether requests came since the numbers were copied
        self._runner = runner
        self.sample = sample
        self._sampler = cast("Sampler", runner.sampler)
        self._bias, _, self._bad_words = self._sampler.logits_processors
        largest, device = runner.max_num_reqs, runner.device
        self._slots = torch.zeros(largest, dtype=torch.int64, device=device)
        self._rows = torch.arange(largest, dtype=torch.int64, device=device)
        self._bounds = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(largest, dtype=torch.int32, device=device)
        self._ones = torch.ones(largest, dtype=torch.int32, device=device)
        owners = (runner.req_states, self._sampler.sampling_states, *self._sampler.logits_processors)
        found = [value for owner in owners for value in vars(owner).values() if isinstance(value, UvaBackedTensor)]
        self._numbers = [(number, torch.empty_like(number.gpu)) for number in found]
        self._graphs: dict[tuple[int, Hashable], Recorded] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None
        self._brought: torch.Tensor | None = None  # the batch whose slots the graphs have
        self._kind: tuple[object, Hashable] = (None, None)  # of the last batch
        self._works = True

    def __call__(self, hidden: torch.Tensor, batch: InputBatch) -> SamplerOutput | None:
        """Sample a step by a graph; None if it has to be done without."""
        if not self._works or batch.has_prefill or not self.holds(hidden):
            return None
        kind = self._kind_of(batch)
        if kind is None:
            return None
        rows = self.rows_of(batch)
        self._bring(batch, rows)
        known = self._graphs.get((rows, kind))
        if known is None:
            known = self._add((rows, kind), hidden, batch)
        if known is None:
            return None
        replay, output = known
        replay()
        count, nans = batch.num_reqs, output.num_nans
        return SamplerOutput(  # copies: the results may still be on their way to the host in the next step
            sampled_token_ids=output.sampled_token_ids[:count].clone(),
            logprobs_tensors=None,
            num_nans=None if nans is None else nans[:count].clone(),
            num_sampled=self._ones[:count],
            num_rejected=self._zeros[:count],
        )

    # -- the device

    def holds(self, hidden: torch.Tensor) -> bool:
        """Whether these hidden states are where a whole graph of the model leaves those of every decode step."""
        manager = self._runner.cudagraph_manager
        static = manager.hidden_states if manager is not None else None
        return static is not None and static.data_ptr() == hidden.data_ptr()

    def rows_of(self, batch: InputBatch) -> int:
        """How many rows a graph for this batch has."""
        return batch.num_reqs_after_padding

    def record(self, hidden: torch.Tensor, batch: InputBatch) -> Recorded:
        """Capture the sampling of a batch: how to repeat it, and where its results then are."""
        if self._pool is None:
            self._reserve()
        graph = torch.cuda.CUDAGraph()
        with self.own_numbers():
            self.sample(hidden, batch)  # compiles its kernels
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = self.sample(hidden, batch)
        self._pool = self._pool or graph.pool()
        return graph.replay, output

    @contextmanager
    def own_numbers(self) -> Iterator[None]:
        """Have vLLM's sampler read the copies of the requests' numbers."""
        originals = [number.gpu for number, _ in self._numbers]
        try:
            for number, copy in self._numbers:
                number.gpu = copy
            yield
        finally:
            for (number, _), original in zip(self._numbers, originals, strict=True):
                number.gpu = original

    # -- batches

    def _kind_of(self, batch: InputBatch) -> Hashable:
        """What decides which kernels vLLM launches; None for what cannot be captured."""
        slots = batch.idx_mapping_np
        if self._kind[0] is not slots:  # steps of a burst share them
            self._kind = (slots, self._find_kind(slots))
        return self._kind[1]

    def _find_kind(self, slots: np.ndarray) -> Hashable:
        sampler, states = self._sampler, self._sampler.sampling_states
        bias, bad_words = cast("LogitBiasState", self._bias), cast("BadWordsState", self._bad_words)
        if (states.num_logprobs[slots] != NO_LOGPROBS).any() or bad_words.num_bad_words.np[slots].any():
            return None
        temperature = states.temperature.np[slots]
        top_k = (states.top_k.np[slots] != states.vocab_size).any()
        top_p = (states.top_p.np[slots] != 1.0).any()
        seeded = states.any_greedy(slots) or states.any_explicit_seed(slots)
        if sampler.use_flashinfer and (top_k or top_p) and not seeded:
            return None  # another sampler, with a generator of its own
        return (
            bool(sampler.needs_logits_processing[slots].any()),
            bool(bias.use_logit_bias[slots].any()),
            bool(bias.restore_when_all_masked.np[slots].any()),
            bool(sampler.penalties_state.use_penalty[slots].any()),
            bool(((temperature == 0.0) | (temperature == 1.0)).all()),
            bool((states.min_p.np[slots] == 0.0).all()),
            bool(top_k),
            bool(top_p),
        )

    def _bring(self, batch: InputBatch, rows: int) -> None:
        """Have the graphs read this batch's slots and its requests' numbers."""
        if self.stale:
            torch._foreach_copy_([copy for _, copy in self._numbers], [number.gpu for number, _ in self._numbers])
            self.stale = False
        if self._brought is not batch.idx_mapping:  # steps of a burst share it
            count = batch.num_reqs
            self._slots[:count].copy_(batch.idx_mapping)
            if count < rows:
                self._slots[count:rows] = batch.idx_mapping[:1]
            self._brought = batch.idx_mapping

    def _add(self, key: tuple[int, Hashable], hidden: torch.Tensor, batch: InputBatch) -> Recorded | None:
        """Record a graph for batches like this, unless it is the first one."""
        if key not in self._seen or len(self._graphs) >= MOST_GRAPHS:
            self._seen.add(key)
            return None
        try:
            recorded = self.record(hidden, self._static(batch, key[0]))
        except Exception:  # a kernel that cannot be captured raises anything
            logger.warning("Sampling cannot be captured in a CUDA graph; it goes on without.", exc_info=True)
            self._works = False
            return None
        self._graphs[key] = recorded
        return recorded

    def _static(self, batch: InputBatch, rows: int) -> InputBatch:
        """A batch of `rows` decoding requests at the addresses where those of every step are."""
        buffers = self._runner.input_buffers
        return replace(
            batch,
            num_reqs=rows,
            idx_mapping=self._slots[:rows],
            idx_mapping_np=np.resize(batch.idx_mapping_np, rows),  # only what kinds of requests there are matters
            expanded_idx_mapping=self._slots[:rows],
            expanded_local_pos=self._zeros[:rows],
            input_ids=buffers.input_ids[:rows],
            positions=buffers.positions[:rows],
            seq_lens=buffers.seq_lens[:rows],
            logits_indices=self._rows[:rows],
            cu_num_logits=self._bounds[: rows + 1],
            cu_num_logits_np=np.arange(rows + 1, dtype=np.int32),
        )

    def _reserve(self) -> None:
        """Have vLLM's kernels of top-k and top-p allocate what they need for the largest batch.

        They keep it, and replace it by something larger when it is needed, which would leave the graphs the old one.
        """
        states = self._sampler.sampling_states
        logits = torch.zeros(len(self._rows), states.vocab_size, device=self._rows.device)
        top_k = torch.full_like(self._zeros, 2)
        top_p = torch.full_like(self._zeros, 0.5, dtype=torch.float32)
        for k, p in ((top_k, top_p), (top_k, None), (None, top_p)):
            apply_top_k_top_p(logits.clone(), k, p)


def can_graph(runner: GPUModelRunner) -> bool:
    """Whether a runner samples on a GPU of its own, by vLLM's own sampler and none of its rarer parts."""
    sampler = runner.sampler
    return (
        runner.device.type == "cuda"
        and sampler is not None
        and len(sampler.logits_processors) == 3
        and not sampler.thinking_budget_state.enabled
        and sampler.trace_replay_state is None
        and not sampler.return_sampling_mask
        and runner.vllm_config.parallel_config.world_size == 1
        and runner.lora_config is None
        and runner.batch_sharder is None
        and runner.speculative_config is None
    )
