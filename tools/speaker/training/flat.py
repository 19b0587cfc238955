"""All parameters of a module in one flat tensor: a few kernels a step, and safe to capture as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements: every parameter begins at a multiple of it
BETAS = (0.9, 0.98)
CLIP = 1.0  # largest norm of the gradient


class Flat:
    """Master weights, their average and AdamW in float32; the module computes in `dtype`.

    Args:
        module: its parameters become views of one tensor, their gradients of another.
        decay: of the weights with more than one dimension.
        average: how much of the average each step keeps.
    """

    KEPT = ("master", "m", "v", "mean", "steps")

    def __init__(self, module: nn.Module, dtype: torch.dtype, *, decay: float, average: float) -> None:
        self.module, self.average = module, average
        named = list(module.named_parameters())
        sizes = [-(-value.numel() // ALIGNMENT) * ALIGNMENT for _, value in named]
        device = named[0][1].device
        self.master, self.decays = torch.zeros(sum(sizes), device=device), torch.zeros(sum(sizes), device=device)
        self.spans: dict[str, tuple[int, int, torch.Size]] = {}
        at = 0
        for (name, value), size in zip(named, sizes, strict=True):
            self.spans[name] = at, value.numel(), value.shape
            self.master[at : at + value.numel()] = value.detach().reshape(-1).float()
            if value.dim() > 1:
                self.decays[at : at + size] = decay
            at += size
        self.work = self.master.to(dtype) if dtype != torch.float32 else self.master
        self.grad = torch.zeros_like(self.work)
        self.grads = []
        for name, value in named:
            at, count, shape = self.spans[name]
            value.data = self.work[at : at + count].view(shape)
            self.grads.append(self.grad[at : at + count].view(shape))
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.mean = self.master.clone()
        self.rate, self.steps, self.norm, self.bad = (torch.zeros((), device=device) for _ in range(4))

    @torch.no_grad()
    def step(self) -> None:
        """Takes one AdamW step from the gradients, which are then zero; one that is not finite changes no weight."""
        gradient = self.grad.float()
        norm = gradient.norm()
        good = torch.isfinite(norm)
        gradient = torch.where(good, gradient * (CLIP / (norm + 1e-6)).clamp(max=1.0), torch.zeros_like(gradient))
        self.norm.copy_(norm)
        self.bad.add_(1.0 - good.float())
        first, second = BETAS
        self.steps.add_(1)
        self.m.lerp_(gradient, 1 - first)
        self.v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        m = self.m / (1 - first**self.steps)
        v = self.v / (1 - second**self.steps)
        change = m / (v.sqrt() + 1e-8) + self.decays * self.master
        self.master.sub_(change * (self.rate * good))
        if self.work is not self.master:
            self.work.copy_(self.master)
        keep = torch.clamp((1 + self.steps) / (10 + self.steps), max=self.average)
        self.mean.lerp_(self.master, 1 - keep)
        self.grad.zero_()

    def averaged(self) -> dict[str, Tensor]:
        """Returns the averages by name, with buffers that are no parameters."""
        found = {name: value.detach().clone().float() for name, value in self.module.state_dict().items()}
        for name, (at, count, shape) in self.spans.items():
            found[name] = self.mean[at : at + count].view(shape).clone()
        return found

    def state(self) -> dict[str, Tensor]:
        """Returns what a later run continues from."""
        return {name: getattr(self, name) for name in self.KEPT}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continues from a state; raises RuntimeError if it is of another module."""
        for name in self.KEPT:
            getattr(self, name).copy_(state[name])
        if self.work is not self.master:
            self.work.copy_(self.master)


class Graphs:
    """Runs functions without arguments that work on static tensors; on a GPU each is captured once as a CUDA graph."""

    def __init__(self, use: bool) -> None:
        self.use = use
        self.made: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.pool = torch.cuda.graph_pool_handle() if use else None

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Runs a function, under its key the first time; what is read by the graph must stay where it is."""
        if not self.use:
            function()
        elif key in self.made:
            self.made[key].replay()
        else:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                function()  # counts as a step
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                function()
            self.made[key] = graph
