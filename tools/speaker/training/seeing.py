"""What the thinker sees: one shape in one color on a ground, as prompts with a picture."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from tools.speaker.training.senses import PATCH, Thinker
from tools.speaker.training.stored import Stored, ceil_to, with_reply

# Height and width in tokens, pictures of a batch.
GRIDS = (
    *((8, 8, 48), (4, 4, 64), (6, 6, 64), (10, 10, 32), (6, 9, 48), (9, 6, 48)),
    *((16, 16, 12), (12, 12, 20), (16, 12, 16)),
)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Seen:
    """A batch of prompts with a picture: ids, targets [B, L], places [3, B, L], pictures [B, 3, 28 h, 28 w]."""

    ids: Tensor
    targets: Tensor
    places: Tensor
    pictures: Tensor


@cache
def constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns mean and spread of the processor's pictures; made once, since a graph cannot copy from the host."""
    mean, spread = (torch.tensor(values, device=device)[None, :, None, None] for values in (MEAN, STD))
    return mean, spread


def draw(shape: Tensor, color: Tensor, ground: Tensor, height: int, width: int, *, noise: bool = True) -> Tensor:
    """Returns pictures [B, 3, height, width], normalised: one shape each, anywhere, on a ground.

    Args:
        shape: [B]; 0 circle, 1 square, 2 triangle.
        color, ground: [B, 3], from 0 to 1.
        noise: whether some are drawn with noise.
    """
    b, device, short = len(shape), shape.device, min(height, width)
    y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    size = (0.22 + 0.25 * torch.rand(b, device=device)) * short
    left = size + torch.rand(b, device=device) * (width - 2 * size)
    top = size + torch.rand(b, device=device) * (height - 2 * size)
    x, y = x[None] - left[:, None, None] + 0.5, y[None] - top[:, None, None] + 0.5
    radius = size[:, None, None]
    circle = (x.square() + y.square()).sqrt() - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.9 * radius
    triangle = torch.maximum(y - 0.8 * radius, (x.abs() * 1.8 - y - radius) / 2.06)  # its tip is above
    distance = torch.stack([circle, square, triangle], 1)[torch.arange(b, device=device), shape]
    cover = (0.5 - distance).clamp(0, 1)[:, None]
    picture = ground[:, :, None, None] * (1 - cover) + color[:, :, None, None] * cover
    if noise:
        picture = picture + torch.randn_like(picture) * (0.03 * torch.rand(b, 1, 1, 1, device=device))
    mean, spread = constants(device)
    return (picture.clamp(0, 1) - mean) / spread


class Seeing:
    """Draws pictures on the device and asks for what they show."""

    def __init__(self, stored: Stored) -> None:
        recipe = stored.recipe
        self.stored, self.device = stored, stored.device
        self.head = stored.tensor(np.array(recipe["vision_head"]))
        self.tails, self.replies = stored.table("vision_tails"), stored.table("seen")
        self.colors = stored.tensor(np.array(list(recipe["colors"].values()), np.float32) / 255)
        names = list(recipe["colors"])
        self.light = [names.index(name) for name in ("white", "yellow")]
        self.shapes = len(recipe["shapes"])

    def batch(self, h: int, w: int, count: int, question: int | None = None) -> Seen:
        """Returns prompts with pictures of h times w tokens, with any question or the one of that number."""
        device, colors = self.device, len(self.colors)
        color, shape = (
            torch.randint(colors, (count,), device=device),
            torch.randint(self.shapes, (count,), device=device),
        )
        pictures = draw(shape, self._near(color), self._grounds(color), 2 * PATCH * h, 2 * PATCH * w)
        recipe, tails = self.stored.recipe, len(self.tails)
        asked = torch.randint(0, tails, (count,), device=device)
        if question is not None:
            asked = torch.full_like(asked, question)
        both, colored = recipe["vision_questions"], recipe["vision_questions"] + recipe["color_questions"]
        alone = torch.where(asked < colored, color, colors + shape) + colors * self.shapes
        which = torch.where(asked < both, color * self.shapes + shape, alone)
        head, patches = len(self.head), h * w
        size = ceil_to(head + patches + self.tails.longest + self.replies.longest + 2, 8)
        at = torch.arange(size, device=device)[None].expand(count, -1)
        place = at - head - patches
        ids = torch.where(at < head, self.head[at.clamp(max=head - 1)], 0)
        ids = torch.where(place >= 0, self.tails.pick(asked, place), ids)
        place = place - self.tails.sizes(asked)
        ids, targets = with_reply(
            ids, place, self.replies.pick(which, place), self.replies.sizes(which), self.stored.end
        )
        i = (at - head).clamp(0, patches - 1)
        inside, behind = (at >= head) & (at < head + patches), at - patches + max(h, w)
        grid = (torch.full_like(at, head), head + i // w, head + i % w)
        places = torch.stack([torch.where(inside, value, torch.where(at < head, at, behind)) for value in grid])
        return Seen(ids, targets, places, pictures)

    def _near(self, color: Tensor) -> Tensor:
        """Returns colors [B, 3] somewhat off those of the numbers [B]."""
        return (self.colors[color] + 0.05 * torch.randn(len(color), 3, device=self.device)).clamp(0, 1)

    def _grounds(self, color: Tensor) -> Tensor:
        """Returns another color for each shape, or light grey to white if it is neither white nor yellow."""
        count, device = len(color), self.device
        other = (color + torch.randint(1, len(self.colors), (count,), device=device)) % len(self.colors)
        plain = (0.75 + 0.25 * torch.rand(count, 1, device=device)).expand(-1, 3)
        light = torch.rand(count, 1, device=device) < 0.5
        for number in self.light:
            light = light & (color != number)[:, None]
        return torch.where(light, plain, self._near(other))


def embeds_with_picture(thinker: Thinker, seen: Seen, head: int) -> Tensor:
    """Returns embeddings [B, L, 192] in which the picture stands behind the first `head` tokens."""
    rows: Tensor = thinker.visual(seen.pictures)
    embeds: Tensor = thinker.model.embed_tokens(seen.ids)
    return torch.cat([embeds[:, :head], rows, embeds[:, head + rows.shape[1] :]], 1)
