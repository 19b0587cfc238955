"""Videos as MiniCPM-o perceives them: a frame for each second, which is not sliced, and after it the second's sound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omni_actors.engine.models.minicpm_o.config import QUERIES
from omni_actors.engine.models.minicpm_o.pictures import picture_embeddings
from omni_actors.errors import InvalidRequest
from omni_actors.media.limits import AUDIO_RATE

FRAMES, FRAME_SIZES, SOUND, SOUND_LENGTH = "video_pixels", "video_frame_sizes", "video_sound", "video_sound_length"
LONGEST_SECONDS = 60  # of a video, and of a recording
SECOND = 10  # embeddings of a second of sound
LAST_SAMPLES = 1600  # at least, of the last second

Film = tuple[NDArray[np.uint8], NDArray[np.float32]]


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
