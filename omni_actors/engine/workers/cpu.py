"""Worker and runner of autoregressive stages on the CPU.

Never import this on CUDA: vLLM's CPU worker patches `torch.cuda` when it is imported, after which the V2 runner fails
on the GPU ("Pointer argument cannot be accessed from Triton").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from omni_actors.engine.workers import numpy_kernels
from omni_actors.engine.workers.base import OmniWorkerBase
from omni_actors.engine.workers.runner import OmniRunnerMixin


class CPUSampler(Sampler):
    """vLLM's sampler with the random draw in PyTorch.

    vLLM sends top-k/top-p to a Triton kernel whenever Triton is present, and Triton's interpreter cannot run that
    kernel; it can run the Gumbel kernel, which then takes most of a step. See docs/decisions.md.
    """

    def __init__(self, made_by_vllm: Sampler) -> None:
        # Takes over the state of a sampler that vLLM has built; its constructor arguments are not known here.
        vars(self).update(vars(made_by_vllm))
        self.compute_nans = False  # by a kernel that the interpreter cannot run; `__call__` does it

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Sample, and count the NaN of each request's logits."""
        num_nans = logits.isnan().sum(dim=-1, dtype=torch.int32)  # first: sampling writes to the logits
        output = super().__call__(logits, input_batch)
        output.num_nans = num_nans
        return output

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *flags: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Without drafts there is one row of logits per request. The flags choose among kernels; vLLM 0.33 has one more.
        del expanded_idx_mapping, flags
        if top_k is not None or top_p is not None:
            processed_logits = apply_top_k_top_p_pytorch(processed_logits, top_k, top_p)
        noisy = processed_logits
        temperatures = self.sampling_states.temperature.np[idx_mapping_np]
        if temperatures.any():
            noisy = processed_logits.float().clone()
            seeds = self.sampling_states.seeds.np[idx_mapping_np].tolist()
            for row, (seed, position, temperature) in enumerate(zip(seeds, pos.tolist(), temperatures, strict=True)):
                if temperature:
                    noisy[row] += _gumbel_noise(seed, position, noisy.shape[1])
        return noisy.argmax(dim=-1), processed_logits


def _gumbel_noise(seed: int, position: int, size: int) -> torch.Tensor:
    """Noise f32 [size] that depends only on the request's seed and the position, not on the rest of the batch."""
    generator = np.random.Generator(np.random.Philox(key=[seed, position]))
    return torch.from_numpy(generator.gumbel(size=size).astype(np.float32))


class CPUStructuredOutputs(StructuredOutputsWorker):
    """vLLM's application of grammars in numpy: Triton's interpreter cannot run its kernel."""

    def __init__(self, made_by_vllm: StructuredOutputsWorker) -> None:
        vars(self).update(vars(made_by_vllm))

    def apply_grammar_bitmask(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        grammar_req_ids: list[str],
        grammar_bitmask: NDArray[np.int32],
    ) -> None:
        """Set the logits of tokens whose bit is 0 to minus infinity; one row of the mask per request."""
        bits = np.unpackbits(grammar_bitmask.view(np.uint8), axis=-1, bitorder="little")[:, : logits.shape[-1]]
        for request_id, allowed in zip(grammar_req_ids, bits, strict=True):
            row = int(input_batch.cu_num_logits_np[input_batch.req_ids.index(request_id)])
            logits[row, : len(allowed)].masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)


class OmniCPURunner(OmniRunnerMixin, CPUModelRunner):
    """vLLM's V2 runner on the CPU with rows in and out."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's `load_model`, then what takes the place of kernels that cannot run here."""
        super().load_model(*args, **kwargs)
        if self.sampler is not None:  # only where the last layers are
            self.sampler = CPUSampler(self.sampler)
        if self.structured_outputs_worker is not None:
            self.structured_outputs_worker = CPUStructuredOutputs(self.structured_outputs_worker)


class OmniCPUWorker(OmniWorkerBase, CPUWorker):
    """vLLM's CPU worker with our runner."""

    def init_device(self) -> None:
        """vLLM's `init_device`, then our runner in place of the one it made."""
        numpy_kernels.enable()
        # This also makes vLLM's own runner, which only allocates small buffers on the CPU.
        super().init_device()
        # Declared for the V1 runner; vLLM assigns its V2 runner just so.
        self.model_runner = OmniCPURunner(self.vllm_config, self.device)  # type: ignore[assignment, arg-type]
