"""What `prepare` has written, on the device: lists of token ids, prompts around them, and the order of examples."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from tools.speaker import SpeakerError

IGNORED = -100
FOLDER = "prepared"
TEXTS, RECIPE, HELD_OUT = "text.npz", "recipe.json", "held_out.json.gz"
Array = npt.NDArray[Any]


def ceil_to(size: int, step: int) -> int:
    """Returns the next multiple of `step`."""
    return -(-size // step) * step


@dataclass(frozen=True)
class Ragged:
    """Lists of numbers one behind the other: list `i` lies from `starts[i]` to `starts[i + 1]`."""

    values: Tensor
    starts: Tensor
    longest: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sizes(self, index: Tensor) -> Tensor:
        """Returns the lengths [B, 1] of the lists at index [B]."""
        return (self.starts[index + 1] - self.starts[index])[:, None]

    def pick(self, index: Tensor, place: Tensor) -> Tensor:
        """Returns what stands at places [B, L] of the lists at index [B]; anything where a place is outside."""
        at = (self.starts[index][:, None] + place.clamp(min=0)).clamp(max=len(self.values) - 1)
        return self.values[at].long()


class Stored:
    """The prepared folder. Raises SpeakerError if there is none."""

    def __init__(self, work: Path, device: str) -> None:
        folder = work / FOLDER
        missing = [name for name in (TEXTS, RECIPE, HELD_OUT) if not (folder / name).exists()]
        if missing:
            raise SpeakerError(f"{folder} lacks {missing[0]}; run python -m tools.speaker prepare {work}.")
        self.device = device
        with np.load(folder / TEXTS) as file:
            self.host: dict[str, Array] = {name: file[name] for name in file.files}
        self.recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
        with gzip.open(folder / HELD_OUT, "rt", encoding="utf-8") as file:
            self.held_out: dict[str, list[dict[str, Any]]] = json.load(file)
        self.sizes = {name: SimpleNamespace(**fields) for name, fields in self.recipe["sizes"].items()}
        self.prefix, self.suffix = (self.tensor(np.array(self.recipe[name])) for name in ("prefix", "suffix"))
        self.wrapped = len(self.prefix) + len(self.suffix)
        self.end = int(self.recipe["end"])

    def tensor(self, array: Array) -> Tensor:
        """Returns an array on the device."""
        return torch.as_tensor(array, device=self.device)

    def lists(self, name: str, starts: str | None = None) -> Ragged:
        """Returns the lists that lie in NAME and NAME_starts, or in NAME with the starts of other lists."""
        return self._ragged(self.host[name], self.host[f"{starts or name}_starts"])

    def table(self, name: str) -> Ragged:
        """Returns lists of the recipe."""
        rows: Sequence[Sequence[int]] = self.recipe[name]
        starts = np.cumsum([0, *map(len, rows)])
        return self._ragged(np.array([number for row in rows for number in row] or [0]), starts)

    def _ragged(self, values: Array, starts: Array) -> Ragged:
        longest = int(np.diff(starts).max(initial=1))
        return Ragged(self.tensor(values), self.tensor(starts.astype(np.int64)), longest)

    def prompt(self, place: Tensor, messages: Ragged, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids of whole prompts at places [1, L], right as far as they go, and their lengths [B, 1]."""
        before, behind, count = len(self.prefix), len(self.suffix), messages.sizes(index)
        ids = torch.where(
            place < before, self.prefix[place.clamp(max=before - 1)], messages.pick(index, place - before)
        )
        tail = self.suffix[(place - before - count).clamp(0, behind - 1)]
        return torch.where(place >= before + count, tail, ids), before + count + behind


def with_reply(ids: Tensor, place: Tensor, reply: Tensor, count: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Puts replies behind prompts; returns ids and targets [B, L], of which only replies and their end are not -100.

    Args:
        ids: [B, L], prompts.
        place: [B, L], places counted from the prompt's end.
        reply: [B, L], what stands at these places.
        count: [B, 1], lengths of the replies.
        end: the token behind them; padding is 0.
    """
    ids = torch.where(place < 0, ids, torch.where(place < count, reply, torch.where(place == count, end, 0)))
    targets = torch.where((place >= 0) & (place <= count), ids, IGNORED)
    return ids, functional.pad(targets[:, 1:], (0, 1), value=IGNORED)


class Order:
    """Numbers of examples in buckets of one shape, each in random order on the device.

    What `draw` returns stays at the same place in memory for each bucket, since CUDA graphs read it.
    """

    def __init__(self, device: str, rng: random.Random) -> None:
        self.device, self.rng = device, rng
        self.members: dict[int, Tensor] = {}
        self.batches: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._drawn: dict[Hashable, Tensor] = {}

    def put(self, bucket: int, members: Array, batch: int) -> None:
        """Adds a bucket, of which `batch` examples are drawn at a time."""
        self.members[bucket], self.batches[bucket] = torch.as_tensor(members, device=self.device), batch
        self._places[bucket] = len(members)

    def draw(self) -> tuple[int, Tensor]:
        """Returns a bucket, chosen by how many batches it has, and its next examples."""
        buckets = list(self.members)
        weights = [len(self.members[bucket]) / self.batches[bucket] for bucket in buckets]
        bucket = self.rng.choices(buckets, weights)[0]
        taken = self._take(bucket)
        return bucket, self._drawn.setdefault(bucket, taken.clone()).copy_(taken)

    def _take(self, bucket: int) -> Tensor:
        members, batch = self.members[bucket], self.batches[bucket]
        if len(members) < batch:
            return members[torch.randint(len(members), (batch,), device=self.device)]
        if self._places[bucket] + batch > len(members):
            self.members[bucket] = members = members[torch.randperm(len(members), device=self.device)]
            self._places[bucket] = 0
        at = self._places[bucket]
        self._places[bucket] += batch
        return members[at : at + batch]
