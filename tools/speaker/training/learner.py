"""Training of thinker and talker: losses whose gradients add up, steps as CUDA graphs, a state to continue from."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from pathlib import Path

import torch
from torch import Tensor, nn

from tools.speaker import SpeakerError
from tools.speaker.parts import read_part, write_part
from tools.speaker.training.flat import Flat, Graphs
from tools.speaker.training.loop import Clock, Options, state_path

EMBEDDING_SIZE = 0.25  # of new embeddings: the talker reads them beside hidden states, which are about that large
REPORT_EVERY, WAIT_EVERY = 10.0, 8  # seconds; steps
Figures = dict[str, Tensor]
Weights = dict[str, Tensor]


class Learner:
    """A module with its optimiser and its clock.

    Args:
        module: moved to the device; begins from `state/` of the work folder, else from `--from`, else with new weights.
        peak: of the rate, where the options name none.
        decay, average: see `Flat`.
        adapt: turns the weights of `--from` into those of the module.

    Raises:
        SpeakerError: what is to be continued does not fit the module.
    """

    def __init__(
        self,
        part: str,
        module: nn.Module,
        options: Options,
        *,
        peak: float,
        decay: float,
        average: float,
        adapt: Callable[[Weights], Weights] = lambda weights: weights,
    ) -> None:
        self.part, self.options, self.module = part, options, module
        kept = state_path(options, part)
        try:
            if options.start is not None and not kept.exists():
                module.load_state_dict(adapt(read_part(options.start, part)))
            elif not kept.exists():
                nn.init.normal_(module.get_parameter("model.embed_tokens.weight"), std=EMBEDDING_SIZE)
            on_gpu = options.device != "cpu"
            self.dtype = torch.bfloat16 if on_gpu else torch.float32
            self.flat = Flat(module.to(options.device), self.dtype, decay=decay, average=average)
            if kept.exists():
                self.flat.load(torch.load(kept, weights_only=True, map_location=options.device)["flat"])
        except (RuntimeError, KeyError) as error:
            raise SpeakerError(f"The weights of the {part} do not fit: {str(error)[:300]}") from error
        self.parameters = list(module.parameters())
        self.graphs = Graphs(on_gpu and options.graphs)
        self.figures: dict[tuple[Hashable, str], Tensor] = {}
        self.event = torch.cuda.Event() if on_gpu else None
        self.clock = Clock(max(1.0, options.seconds), options.rate or peak)
        self._saved = self._reported = time.monotonic()

    def running(self) -> bool:
        """Tells whether there is time left."""
        return self.clock.done() < 1 and self.clock.steps != self.options.steps

    def add(self, key: Hashable, loss_of: Callable[[], tuple[Tensor, Figures]], *, graph: bool = True) -> None:
        """Adds the gradients of a loss, which comes with figures to report.

        Args:
            key: of the CUDA graph; losses of one key read the same static tensors.
            loss_of: returns the loss and its figures.
            graph: false for what had better not be captured.
        """

        def work() -> None:
            loss, figures = loss_of()
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            there = [(sum_, one) for sum_, one in zip(self.flat.grads, found, strict=True) if one is not None]
            torch._foreach_add_([sum_ for sum_, _ in there], [one for _, one in there])
            for name, value in figures.items():
                if (key, name) not in self.figures:
                    self.figures[key, name] = torch.zeros((), device=value.device)
                self.figures[key, name].copy_(value.detach())

        if graph:
            self.graphs.run(key, work)
        else:
            work()

    def step(self) -> None:
        """Takes a step down all gradients that were added, and prints a line every ten seconds."""
        self.flat.rate.fill_(self.clock.next_rate())
        self.graphs.run("step", self.flat.step)
        if self.event is not None and self.clock.steps % WAIT_EVERY == 0:  # the clock must not run ahead of the device
            self.event.synchronize()
            self.event.record()
        if time.monotonic() - self._reported > REPORT_EVERY:
            self.report(f"step {self.clock.steps}, {self.clock.done():.0%} of the time: {self.said()}")
            self._reported = time.monotonic()

    def save_due(self) -> bool:
        """Tells whether the last save is a minute old."""
        return time.monotonic() - self._saved > self.options.save_every

    def save(self) -> Path:
        """Writes the averages into `parts/`, the optimiser into `state/`; returns the part's path.

        Raises SpeakerError, and leaves what was written before, if a weight is not finite.
        """
        means = self.flat.averaged()
        if not all(bool(value.half().isfinite().all()) for value in means.values()):
            raise SpeakerError(f"The {self.part} has weights that are not finite; lower --rate. The last save stays.")
        path = state_path(self.options, self.part)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"flat": self.flat.state()}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        self._saved = time.monotonic()
        return write_part(self.options.work / "parts", self.part, means, {})

    def said(self) -> str:
        """Returns the last figures as text, with the gradient's norm and how many gradients were not finite."""
        sums: dict[str, list[float]] = {}
        for (_, name), value in self.figures.items():
            sums.setdefault(name, []).append(float(value))
        figures = " ".join(f"{name} {sum(values) / len(values):.4f}" for name, values in sums.items())
        return f"{figures} norm {float(self.flat.norm):.2f} bad {int(self.flat.bad)}"

    def report(self, text: str) -> None:
        """Prints a line."""
        print(f"[{self.part}] {text}", flush=True)
