"""Trains one part of a checkpoint: the same loop for all of them."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from tools.checkpoints.measure import load_reference_model
from tools.speaker import SpeakerError
from tools.speaker.checkpoint import WEIGHTS, save
from tools.speaker.dit import Dit
from tools.speaker.talker import Talker
from tools.speaker.texts import Texts
from tools.speaker.thinker import Thinker
from tools.speaker.vocoder import Vocoder

WARM_UP, FLOOR = 200, 0.02  # steps; of the rate, at the end
SAVE_EVERY, REPORTS = 1000, 100  # steps; lines of a run
AVERAGE = 0.999  # each step keeps this much of the average of the weights, which is what is saved
WORKERS = 2  # processes that make examples
SEED = 1
Batch = dict[str, Tensor]


class Part(Protocol):
    """What differs from part to part."""

    module: nn.Module
    rate: float
    betas: tuple[float, float]
    decay: float

    def batches(self, rng: random.Random) -> Iterator[Batch]:
        """Yields batches on the CPU, without an end."""

    def loss(self, batch: Batch, done: float) -> Tensor:
        """Returns what the step lowers; `done` is how much of the training is over, from 0 to 1."""


# Each takes the whole model, its processor, the texts, the examples of a batch and the number of steps.
Maker = Callable[[Any, Any, Texts, int, int], Part]
PARTS: dict[str, Maker] = {"dit": Dit, "vocoder": Vocoder, "thinker": Thinker, "talker": Talker}
BATCHES = {"dit": 16, "vocoder": 4, "thinker": 32, "talker": 16}  # a step takes seconds on a CPU


class Stream(IterableDataset[Batch]):
    """Batches of a part, other ones in each worker."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches of this worker."""
        return self.part.batches(random.Random(torch.initial_seed()))


def train(
    name: str, folder: Path, wordnet: Path, steps: int, *, batch: int | None, device: str, rate: float | None
) -> list[float]:
    """Trains a part and writes it into the checkpoint; returns the mean loss of each line that was printed.

    Raises SpeakerError if there is no checkpoint, the teacher or WordNet is missing, or a weight is not finite.
    """
    from transformers import Qwen2_5OmniProcessor

    if not (folder / WEIGHTS).exists():
        raise SpeakerError(f"{folder} holds no checkpoint: python -m tools.speaker new {folder}, or copy one.")
    torch.manual_seed(SEED)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - WORKERS))  # threads that wait for the workers are far slower
    model = load_reference_model(folder).to(device)
    processor = Qwen2_5OmniProcessor.from_pretrained(folder)
    part = PARTS[name](model.requires_grad_(False), processor, Texts.read(wordnet), batch or BATCHES[name], steps)
    parameters = list(part.module.requires_grad_(True).train().parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate or part.rate, betas=part.betas, weight_decay=part.decay)
    warm_up = min(WARM_UP, max(1, steps // 10))

    def share(step: int) -> float:
        return min(1.0, (step + 1) / warm_up) * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * step / steps)))

    schedule = LambdaLR(optimizer, share)
    mean = AveragedModel(part.module, avg_fn=lambda old, new, n: old + (new - old) * max(1 - AVERAGE, 9 / (10 + n)))
    loader = DataLoader(Stream(part), batch_size=None, num_workers=min(WORKERS, os.cpu_count() or 1))
    lines, losses, begin = list[float](), list[float](), time.monotonic()

    def keep() -> None:
        trained = {key: value.clone() for key, value in part.module.state_dict().items()}
        part.module.load_state_dict(mean.module.state_dict())
        save(model, folder)
        part.module.load_state_dict(trained)

    for step, examples in zip(range(1, steps + 1), loader, strict=False):
        moved = {key: value.to(device) for key, value in examples.items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type != "cpu"):
            loss = part.loss(moved, step / steps)
        loss.backward()
        if nn.utils.clip_grad_norm_(parameters, 1.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean.update_parameters(part.module)
        losses.append(float(loss.detach()))
        if step % max(1, steps // REPORTS) == 0:
            lines.append(sum(losses) / len(losses))
            seconds = time.monotonic() - begin
            print(f"[{name}] step {step} of {steps}, {seconds:.0f} s: loss {lines[-1]:.4f}", flush=True)
            losses.clear()
        if step % SAVE_EVERY == 0:
            keep()
    keep()
    return lines
