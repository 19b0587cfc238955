"""Pictures and videos as MiniCPM-o sees them, as patches.

Of a picture it sees the whole at a fixed area, and above that area slices of it; of a video a frame for each second,
which is not sliced, and after it hears the second's sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from transformers import PretrainedConfig, SiglipVisionConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.idefics2_vision_model import Idefics2VisionTransformer

from omni_actors.engine.models.minicpm_o.config import PATCH, QUERIES, seeing_part
from omni_actors.errors import InvalidRequest
from omni_actors.media.limits import AUDIO_RATE

PIXELS, SIZES = "pixel_values", "slice_sizes"
SIDE = 448  # of a square with the area of a slice
MOST_SLICES = 9
FRAMES, FRAME_SIZES, SOUND, SOUND_LENGTH = "video_pixels", "video_frame_sizes", "video_sound", "video_sound_length"
LONGEST_SECONDS = 60  # of a video, and of a recording
SECOND = 10  # embeddings of a second of sound
LAST_SAMPLES = 1600  # at least, of the last second

Film = tuple[NDArray[np.uint8], NDArray[np.float32]]


def grid_of(width: int, height: int) -> tuple[int, int] | None:
    """Columns and rows of the slices of a picture, about as many as its area needs; `None`: the whole is enough."""
    needed = min(math.ceil(width * height / SIDE**2), MOST_SLICES)
    if needed <= 1:
        return None
    numbers = [number for number in (needed - 1, needed, needed + 1) if 1 < number <= MOST_SLICES]
    grids = [(columns, number // columns) for number in numbers for columns in divisors(number)]
    return min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))


def divisors(number: int) -> list[int]:
    """From 1 on."""
    return [each for each in range(1, number + 1) if number % each == 0]


def fitted(width: float, height: float) -> tuple[int, int]:
    """The size with the area of a slice, of whole patches, and about these proportions."""
    ratio = width / height
    tall = int(SIDE / math.sqrt(ratio))
    return nearest(int(tall * ratio), PATCH), nearest(tall, PATCH)


def nearest(length: float, unit: int) -> int:
    """The multiple of a unit that is nearest, and not zero."""
    return max(round(length / unit) * unit, unit)


def whole_of(picture: Image.Image) -> Image.Image:
    """The whole picture at the area of a slice."""
    return picture.resize(fitted(*picture.size), Image.Resampling.BICUBIC)


def slices_of(picture: Image.Image) -> list[Image.Image]:
    """The whole picture, and then its slices, row by row."""
    width, height = picture.size
    whole, grid = whole_of(picture), grid_of(width, height)
    if grid is None:
        return [whole]
    columns, rows = grid
    wide, tall = fitted(nearest(width, columns) / columns, nearest(height, rows) / rows)
    fine = picture.resize((wide * columns, tall * rows), Image.Resampling.BICUBIC)
    corners = [(column * wide, row * tall) for row in range(rows) for column in range(columns)]
    return [whole, *(fine.crop((left, top, left + wide, top + tall)) for left, top in corners)]


def patches_of(slices: Iterable[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches u8 [n, 3, PATCH, PATCH] of RGB slices, and rows and columns of each, [slices, 2]."""
    patches, sizes = [], []
    for part in slices:
        pixels = torch.from_numpy(np.array(part))
        rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
        patches.append(pixels.view(rows, PATCH, columns, PATCH, 3).permute(0, 2, 4, 1, 3).flatten(0, 1))
        sizes.append((rows, columns))
    return torch.cat(patches), torch.tensor(sizes)


def places_of(grid: tuple[int, int] | None, index: int) -> str:
    """The text that stands for a picture, the `index`th of its prompt: places for the whole, and for each slice."""
    columns, rows = grid or (0, 0)
    line = f"<slice>{'<unk>' * QUERIES}</slice>" * columns
    return f"<image_id>{index}</image_id><image>{'<unk>' * QUERIES}</image>" + "\n".join([line] * rows)


def picture_embeddings(patches: torch.Tensor, sizes: torch.Tensor) -> int:
    """Embeddings that the encoder makes of a picture; -1 if its tensors contradict one another."""
    fits = patches.shape[1:] == (3, PATCH, PATCH) and sizes.shape[1:] == (2,)
    return len(sizes) * QUERIES if fits and sizes.min() >= 1 and int(sizes.prod(dim=1).sum()) == len(patches) else -1


def film_of(frames: NDArray[np.uint8], rate: float, sound: NDArray[np.float32] | None) -> Film:
    """A frame of each second, u8 [seconds, height, width, 3], and the sound, empty or as long as the frames last.

    Args:
        frames: u8 [n, height, width, 3], so many per second.
        sound: f32 [samples] at 16 kHz. What is missing of it is silence.

    Raises:
        InvalidRequest: it is too long.
    """
    seconds = math.ceil(len(frames) / rate)
    if seconds > LONGEST_SECONDS:
        raise InvalidRequest(
            f"The video has {seconds} s; this model takes {LONGEST_SECONDS}.", hint="Send a part of it."
        )
    kept = frames[[int(second * rate) for second in range(seconds)]]
    if sound is None:
        return kept, np.zeros(0, np.float32)
    heard = sound[: int(len(frames) / rate * AUDIO_RATE)]
    return kept, np.pad(heard, (0, max(0, (seconds - 1) * AUDIO_RATE + LAST_SAMPLES - len(heard))))


def slots(seconds: int, embeddings: int) -> list[int]:
    """How many embeddings of the sound follow each frame."""
    return [SECOND] * (seconds - 1) + [embeddings - SECOND * (seconds - 1)] if embeddings else [0] * seconds


def places_of_film(seconds: int, embeddings: int, place: str) -> str:
    """The text that stands for a video, with places for each frame and for the sound of each second."""
    frame, counts = f"<image>{place * QUERIES}</image>", slots(seconds, embeddings)
    return "".join(frame + (f"<|audio_start|>{place * count}<|audio_end|>" if embeddings else "") for count in counts)


def joined(seen: torch.Tensor, heard: torch.Tensor) -> torch.Tensor:
    """Embeddings [places, width] of frames [seconds * QUERIES, width] and of their sound [n, width]."""
    frames = seen.split(QUERIES)
    pairs = zip(frames, heard.split(slots(len(frames), len(heard))), strict=True)
    return torch.cat([part for pair in pairs for part in pair])


def film_embeddings(data: Mapping[str, Any], audio_embeddings: Callable[[int], int]) -> int:
    """Embeddings that the encoders make of a video; -1 if its tensors contradict one another."""
    sizes, frames = data[FRAME_SIZES], int(data[SOUND_LENGTH])
    seen, heard = picture_embeddings(data[FRAMES], sizes), audio_embeddings(frames)
    fits = seen > 0 and frames == data[SOUND].shape[-1] and min(slots(len(sizes), heard)) >= 0
    return seen + heard if fits else -1


class Resampler(nn.Module):
    """Attends from learned queries to the states of a slice's patches."""

    def __init__(self, width: int, seeing_width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(QUERIES, width))
        self.kv_proj = nn.Linear(seeing_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, width // 128, batch_first=True)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.empty(width, width))

    def forward(self, states: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Embeddings [n, QUERIES, width] of n slices, from their states [n, rows * columns, the encoder's width]."""
        values = self.ln_kv(self.kv_proj(states))
        width = values.shape[2]
        rates = 10_000.0 ** -(torch.arange(width // 4, device=states.device) / (width / 4))
        down, across = (torch.arange(size, device=states.device)[:, None] * rates for size in (rows, columns))
        x, y = across.repeat(rows, 1), down.repeat_interleave(columns, dim=0)
        keys = values + torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1).to(values.dtype)
        queries = self.ln_q(self.query).expand(len(states), -1, -1)
        found: torch.Tensor = self.ln_post(self.attn(queries, keys, values, need_weights=False)[0]) @ self.proj
        return found


class PictureEncoder(nn.Module):
    """vLLM's SigLip, with the positions of the model's own code, and the resampler."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: PretrainedConfig = vllm_config.model_config.hf_config
        seeing: SiglipVisionConfig = seeing_part(config)
        layers = seeing.num_hidden_layers - int(getattr(config, "drop_vision_last_layer", True))
        self.vpm = Idefics2VisionTransformer(seeing, num_hidden_layers_override=layers, prefix=f"{prefix}.vpm")
        self.resampler = Resampler(config.hidden_size, seeing.hidden_size)
        self._side = seeing.image_size // PATCH

    def forward(self, patches: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Embeddings [n * QUERIES, width] of slices, from their patches and sizes. Slices of a size are one batch."""
        begin, found = 0, []
        for (rows, columns), alike in groupby(sizes.tolist()):
            count, length = len(list(alike)), rows * columns
            given = patches[begin : begin + count * length].view(count, length, 3, PATCH, PATCH)
            begin += count * length
            pixels = (given.permute(0, 2, 3, 1, 4).flatten(3).float() / 255 - 0.5) / 0.5
            positions = (self._buckets(rows)[:, None] * self._side + self._buckets(columns)).flatten()
            states = self.vpm(pixels, position_ids=positions.to(patches.device).expand(count, length))
            found.append(self.resampler(states, rows, columns).flatten(0, 1))
        return torch.cat(found)

    def _buckets(self, count: int) -> torch.Tensor:
        """The row or column of the table of positions for each of `count` patches.

        Where a patch lies between two, the last bit decides: it is that of the model's code.
        """
        bounds = torch.arange(1 / self._side, 1.0, 1 / self._side)
        places = torch.arange(0, 1 - 1e-6, float(1 / torch.tensor(count)))
        return torch.bucketize(places, bounds, right=True)
