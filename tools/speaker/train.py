"""Trains one part of a checkpoint: the same loop for all of them."""

from __future__ import annotations

import math
import os
import random
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

from tools.checkpoints.reference import load_reference_model
from tools.speaker import SpeakerError
from tools.speaker.checkpoint import WEIGHTS, save
from tools.speaker.dit import Dit
from tools.speaker.talker import Talker
from tools.speaker.texts import Texts
from tools.speaker.thinker import Thinker
from tools.speaker.vocoder import Vocoder

WARM_UP, FLOOR = 200, 0.02  # steps; of the rate, at the end
SAVE_SECONDS, REPORTS = 40, 100  # between two saves; lines of a run
AVERAGE = 0.999  # each step keeps this much of the average of the weights, which is what is saved
KEPT, USES = 12 << 30, 8  # bytes of batches that are kept on the device; how often each is used, on average at most
SEED = 1
Batch = dict[str, Any]  # tensors, and sizes


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


class Stream(IterableDataset[dict[str, npt.NDArray[Any]]]):
    """Batches of a part, other ones in each worker; arrays, as tensors would need shared memory."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __iter__(self) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield the batches of this worker."""
        for batch in self.part.batches(random.Random(torch.initial_seed())):
            yield {name: value.numpy() for name, value in batch.items()}


def train(name: str, folder: Path, options: Namespace) -> None:
    """Trains a part and writes it into the checkpoint.

    It ends after so many steps or seconds of the command's options, whichever comes first.
    Raises SpeakerError if there is no checkpoint, the teacher or WordNet is missing, or a weight is not finite.
    """
    from transformers import Qwen2_5OmniProcessor

    begin = saved = time.monotonic()
    if not (folder / WEIGHTS).exists():
        raise SpeakerError(f"{folder} holds no checkpoint: python -m tools.speaker new {folder}, or copy one.")
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(
        max(1, (os.cpu_count() or 1) - options.workers)
    )  # threads that wait for the workers are far slower
    model = load_reference_model(folder).to(options.device)
    processor = Qwen2_5OmniProcessor.from_pretrained(folder)
    texts, batch, steps = Texts.read(options.wordnet), options.batch or BATCHES[name], options.steps
    part = PARTS[name](model.requires_grad_(False), processor, texts, batch, min(options.own, steps))
    prefix = next(path for path, module in model.named_modules() if module is part.module)
    parameters = list(part.module.requires_grad_(True).train().parameters())
    peak = options.rate or part.rate
    optimizer = torch.optim.AdamW(
        parameters, lr=peak, betas=part.betas, weight_decay=part.decay, fused=options.device == "cuda"
    )
    mean = AveragedModel(part.module, multi_avg_fn=average)
    loader = DataLoader(Stream(part), batch_size=None, num_workers=options.workers, collate_fn=dict)
    losses, done = list[Tensor](), 0.0
    for step, examples in enumerate(fed(loader, options.device, random.Random(SEED)), 1):
        loss = part.loss(examples, done)
        loss.backward()
        for group in optimizer.param_groups:
            warm = min(1.0, step / min(WARM_UP, max(1, steps // 10)))
            group["lr"] = peak * warm * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))
        if nn.utils.clip_grad_norm_(parameters, 1.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()
        mean.update_parameters(part.module)
        losses.append(loss.detach())
        now = time.monotonic()
        before, done = done, min(1.0, max(step / steps, (now - begin) / options.seconds))
        if int(REPORTS * done) > int(REPORTS * before):
            mean_loss = float(torch.stack(losses).mean())
            print(f"[{name}] step {step}, {now - begin:.0f} s: loss {mean_loss:.4f}", flush=True)
            losses.clear()
        if done == 1 or now - saved > SAVE_SECONDS:
            save({f"{prefix}.{key}": value for key, value in mean.module.state_dict().items()}, folder)
            saved = now
        if done == 1:
            break


def fed(loader: Iterable[dict[str, npt.NDArray[Any]]], device: str, rng: random.Random) -> Iterator[Batch]:
    """Yields batches on the device: a new one, or while the workers make it, one of those before again.

    Making examples takes longer than learning from them, and one that comes again at once teaches little.
    """
    batches, kept, count, uses = iter(loader), deque[Batch](), 0, 0
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches)
        while True:
            if coming.done() or uses >= USES * count:
                arrays, count = coming.result(), count + 1
                coming = thread.submit(next, batches)
                # Copied by this thread: no other one may use a GPU while a graph is recorded. Numbers are sizes.
                kept.append({k: torch.from_numpy(v).to(device) if v.ndim else int(v) for k, v in arrays.items()})
                batch = kept[-1]
                while len(kept) > 1 and sum(map(size_of, kept)) > KEPT:
                    kept.popleft()
            else:
                batch = rng.choice(kept)
            uses += 1
            yield batch


def size_of(batch: Batch) -> int:
    """Returns the bytes of a batch's tensors."""
    return sum(value.nbytes for value in batch.values() if isinstance(value, Tensor))


@torch.no_grad()
def average(means: Sequence[Tensor], values: Sequence[Tensor], count: Any) -> None:
    """Moves averages of weights towards their values, further in the first steps."""
    torch._foreach_lerp_(list(means), list(values), max(1 - AVERAGE, 9 / (10 + int(count))))
