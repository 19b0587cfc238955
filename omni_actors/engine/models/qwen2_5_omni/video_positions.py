"""Positions of a video and its sound track, which share one place in a prompt.

vLLM takes the token before the first picture for a picture and the token after the last sound for text, so its
positions are off by a few where a video has sound. These are transformers', with which the model was trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class SoundedVideo:
    """A video with sound: begin of sound, pictures and sound in turns of some seconds each, end of sound.

    Args:
        offset: of its first token, before which is the begin of the video; after its last token is the end of it.
        times: i64 [pictures], positions after the first.
        height: rows of a picture.
        width: columns of a picture.
        sounds: tokens of sound.
        turn: positions in a turn.
    """

    offset: int
    times: NDArray[np.int64]
    height: int
    width: int
    sounds: int
    turn: int

    @property
    def end(self) -> int:
        """The place after its last token."""
        return self.offset + len(self.times) * self.height * self.width + self.sounds + 2

    def positions(self) -> tuple[NDArray[np.int64], int]:
        """Positions [3, tokens] of pictures and sound from 0 on, and the next one after the last turn."""
        rows, columns = np.indices((self.height, self.width)).reshape(2, -1)
        frames = len(self.times)
        times = np.repeat(self.times, self.height * self.width)
        pictures = np.stack([times, np.tile(rows, frames), np.tile(columns, frames)])
        sound = np.broadcast_to(np.arange(self.sounds), (3, self.sounds))
        turns = np.concatenate([times // self.turn * 2, sound[0] // self.turn * 2 + 1])
        order = np.argsort(turns, kind="stable")
        last = turns == turns.max()
        both = np.concatenate([pictures, sound], axis=1)
        return both[:, order], int(both[:, last].max()) + 1


def with_sound(positions: torch.Tensor, videos: Iterable[SoundedVideo]) -> torch.Tensor:
    """Positions i64 [3, P] of a prompt with those of its videos with sound, in order, replaced; what follows moves."""
    for video in videos:
        begin = positions[:, video.offset - 1].max() + 1 if video.offset else torch.tensor(0)
        inner, after = video.positions()
        mark = (begin - 1).expand(3, 1)  # the begin of the sound has the position of the begin of the video
        finish = (begin + after).expand(3, min(2, positions.shape[1] - video.end + 1))  # and so have the two ends
        pieces = [positions[:, : video.offset], mark, torch.from_numpy(inner) + begin, finish]
        rest = positions[:, video.end + 1 :]
        if rest.shape[1]:
            pieces.append(rest + (begin + after + 1 - rest[:, 0].min()))
        positions = torch.cat(pieces, dim=1)
    return positions
