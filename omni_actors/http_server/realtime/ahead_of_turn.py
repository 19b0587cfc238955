"""Decides how much of the user's turn the pipeline computes while the user still speaks."""

from __future__ import annotations

from omni_actors.http_server.realtime.session_config import BYTES_PER_SECOND, RATE

# Samples behind what is to be computed: where sound ends, resampling and features see that it does.
MARGIN = RATE // 20
SHARE = 1 / 30  # of all sound of a conversation, which travels with each request


class AheadOfTurn:
    """Says when there is enough new sound for a request of its own.

    Args:
        seconds: of sound that make one; those of a window of the model's encoder are best. 0 for none.
    """

    def __init__(self, seconds: float) -> None:
        self._step = round(seconds * RATE)
        self._start = 0
        self._done = 0  # samples of the turn

    def due(self, start: int, end: int, conversation_bytes: int) -> int | None:
        """The position up to which to compute a turn now; `None`: nothing that is worth it has come.

        Args:
            start: position of the turn's first sample.
            end: position behind the last sample that has come.
            conversation_bytes: sound of the earlier turns.
        """
        if not self._step:
            return None
        if start != self._start:
            self._start, self._done = start, 0
        reached = (end - start - MARGIN) // self._step * self._step
        seconds = conversation_bytes / BYTES_PER_SECOND + reached / RATE
        if reached - self._done < max(self._step, seconds * SHARE * RATE):
            return None
        self._done = reached
        return start + reached + MARGIN
