"""Frames of codes on their way to the vocoder."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.engine import EngineCoreOutput

from omni_actors.engine.adapter import RequestOutputs
from omni_actors.engine.worker_base import attachment_of
from omni_actors.errors import EngineError
from omni_actors.protocol.stage import UNHEARD
from omni_actors.stage.engine_interface import EngineEvent, StreamEvent

# A message per frame and request would cost the engine's thread more time than the step that makes the frame; the first
# ones are sent at once.
FRAMES_PER_EVENT = (1, 1, 2, 4)


class FrameOutputs(RequestOutputs):
    """Frames of one request as a stream of codes, those of a frame one after the other.

    The last code that the talker samples has no frame: it ends the speech, or no step follows that would hear it.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._sent = 0  # codes
        self._generated = 0  # first codes since the last event, also those without a frame
        self._events = 0
        self._held: list[list[int]] = []
        self._lead: list[int] = []

    def lead(self, codes: list[int]) -> None:
        """Set codes of frames that go before those of the speech, and are not to be heard."""
        self._lead = codes

    def convert(self, output: EngineCoreOutput) -> Sequence[EngineEvent]:
        """An event for every group of frames, and the rest with the last."""
        finished = output.finish_reason is not None
        self._generated += len(output.new_token_ids)
        if output.new_token_ids and not finished:
            frame = attachment_of(output).get("codes")
            if frame is None or frame[0] != output.new_token_ids[-1]:
                raise EngineError(f"The frame of code {output.new_token_ids[-1]} is missing.")
            self._held.append(frame)
        if len(self._held) < FRAMES_PER_EVENT[min(self._events, len(FRAMES_PER_EVENT) - 1)] and not finished:
            return ()
        if not self._held:
            self._lead = []
        codes = [*self._lead, *(code for frame in self._held for code in frame)]
        unheard = {UNHEARD: len(self._lead)} if self._lead else {}
        event = StreamEvent(
            self._request_id,
            token_ids=codes,
            start=self._sent,
            scalars=unheard,
            final=finished,
            generated=self._generated,
        )
        self._lead, self._generated = [], 0
        self._sent += len(codes)
        self._events += 1
        self._held = []
        return (event,)
