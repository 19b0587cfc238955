"""Training of DiT and vocoder: guarded steps, averaged weights, a state to continue from; options and clock of all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.speaker import SpeakerError
from tools.speaker.parts import read_part, write_part

WARM_UP_STEPS = 200
FLOOR = 0.02  # of the rate, at the end
RESUME_RATE = 0.4  # of the peak, where training continues: the full rate has made a trained DiT diverge
MAX_SKIPPED = 50  # steps without a finite gradient, one after the other


@dataclass(frozen=True)
class Options:
    """Of one run of one part.

    Args:
        work: folder of `corpus` and `speak`; its `parts/` receives the weights, `state/` what training continues from.
        seconds: how long to train.
        device: `cuda`, or `cpu` for proofs.
        start: folder with weights to begin from where there is no state: other parts, or a checkpoint.
        rate: peak of the learning rate; None for the part's own.
        seed: of initial weights and of the order of examples.
        scale: of the batches, 1 for a GPU of 80 GB.
        save_every: seconds between saves.
        steps: end after so many, if the time has not ended it before.
        graphs: whether thinker and talker run as CUDA graphs on a GPU.
    """

    work: Path
    seconds: float
    device: str = "cuda"
    start: Path | None = None
    rate: float | None = None
    seed: int = 1
    scale: float = 1.0
    save_every: float = 60.0
    steps: int | None = None
    graphs: bool = True


class Clock:
    """Follows the time of a run: the rate rises over 200 steps and falls as a cosine over the time."""

    def __init__(self, seconds: float, peak: float, now: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.peak, self.now = seconds, peak, now
        self.started, self.steps = now(), 0

    def done(self) -> float:
        """Returns how much of the time is over, from 0 to 1."""
        return min(1.0, (self.now() - self.started) / self.seconds)

    def next_rate(self) -> float:
        """Returns the learning rate of the next step."""
        self.steps += 1
        shape = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * self.done()))
        return self.peak * min(1.0, self.steps / WARM_UP_STEPS) * shape


def has_state(options: Options, part: str) -> bool:
    """Tells whether an earlier run of this part has left weights to continue from."""
    return state_path(options, part).exists() or options.start is not None


def state_path(options: Options, part: str) -> Path:
    """Returns where a part's weights, averages and optimiser are kept between runs."""
    return options.work / "state" / f"{part}.pt"


class Trainer:
    """Steps of one module, safe against gradients that are not finite; keeps an average of its weights.

    Args:
        module: moved to the device and put into training mode.
        peak: of the rate at the first run; a run that continues takes `RESUME_RATE` of it.
        clip: largest norm of the gradient.
        betas, decay: of AdamW.
        average: how much of the average each step keeps.

    Raises:
        SpeakerError: weights to continue from do not fit the module.
    """

    def __init__(
        self,
        part: str,
        module: nn.Module,
        options: Options,
        *,
        peak: float,
        clip: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.98),
        decay: float = 0.02,
        average: float = 0.999,
    ) -> None:
        self.part, self.options, self.clip, self.keep = part, options, clip, average
        self.module = module.to(options.device).train()
        self.parameters = [value for value in module.parameters() if value.requires_grad]
        peak = options.rate or peak * (RESUME_RATE if has_state(options, part) else 1.0)
        fused = options.device != "cpu"
        self.optimizer = torch.optim.AdamW(self.parameters, lr=peak, betas=betas, weight_decay=decay, fused=fused)
        self.skipped = self.updates = 0
        self.others: dict[str, Any] = {}  # is kept in the state
        self.voices: dict[str, dict[str, Tensor]] = {}  # goes into the part
        if has_state(options, part):
            self._load()
        self.mean = [value.detach().clone() for value in self.parameters]
        self.clock = Clock(options.seconds, peak)
        self._saved = time.monotonic()

    def _load(self) -> None:
        path = state_path(self.options, self.part)
        if path.exists():
            state = torch.load(path, weights_only=True, map_location=self.options.device)
            weights, self.others = state["weights"], state["others"]
            self.updates = state["updates"]
            self.optimizer.load_state_dict(state["optimizer"])
        elif self.options.start is not None:
            weights = read_part(self.options.start, self.part)
        try:
            self.module.load_state_dict(weights)
        except RuntimeError as error:
            raise SpeakerError(f"The weights of the {self.part} do not fit: {str(error)[:300]}") from error

    def running(self) -> bool:
        """Tells whether there is time left; saves now and then."""
        if time.monotonic() - self._saved > self.options.save_every:
            self.save()
        return self.clock.done() < 1 and self.clock.steps != self.options.steps

    def step(self, loss: Tensor) -> bool:
        """Takes one step down the loss; skips it, and returns False, if the loss or a gradient is not finite.

        Raises:
            SpeakerError: it was so 50 times in a row.
        """
        rate = self.clock.next_rate()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.clip)
        sound = bool(torch.isfinite(norm)) and bool(torch.isfinite(loss))
        if sound:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._average()
            self.skipped = 0
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped > MAX_SKIPPED:
            raise SpeakerError(f"The {self.part}'s loss was not finite {self.skipped} times in a row; lower --rate.")
        return sound

    @torch.no_grad()
    def _average(self) -> None:
        self.updates += 1
        keep = min(self.keep, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.mean, [value.detach() for value in self.parameters], 1 - keep)

    def averaged(self) -> dict[str, Tensor]:
        """Returns the module's state with the averages in the place of the weights."""
        names = {id(value): name for name, value in self.module.named_parameters()}
        means = {names[id(value)]: mean for value, mean in zip(self.parameters, self.mean, strict=True)}
        return {name: means.get(name, value).detach().clone() for name, value in self.module.state_dict().items()}

    def save(self) -> Path:
        """Writes the averages into `parts/`, everything to continue from into `state/`; returns the part's path."""
        path = state_path(self.options, self.part)
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "weights": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "others": self.others,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        self._saved = time.monotonic()
        return write_part(self.options.work / "parts", self.part, self.averaged(), self.voices)

    def report(self, **figures: float) -> None:
        """Prints a line every hundred steps."""
        if self.clock.steps % 100 == 1:
            values = " ".join(f"{name} {value:.4f}" for name, value in figures.items())
            print(f"[{self.part}] step {self.clock.steps}, {self.clock.done():.0%} of the time: {values}", flush=True)


def autocast(device: str) -> torch.autocast:
    """Returns the context of bfloat16 matrix products on a GPU; on a CPU nothing changes."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=torch.device(device).type != "cpu")
