"""One after the other: for work of a millisecond that many answers have at once, in one event loop."""

from __future__ import annotations

import asyncio


class Turns:
    """Spreads work over turns of the event loop, so that whatever else is ready goes between.

    A step of a vocoder ends with sound for many answers. To encode all of it in one turn would hold up every text that
    arrives meanwhile.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self) -> None:
        """Wait for a turn of the loop in which no other caller works. Callers come in the order of their calls."""
        async with self._lock:
            await asyncio.sleep(0)
