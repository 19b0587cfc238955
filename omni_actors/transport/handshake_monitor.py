"""Why a connection does not come up, and that it was lost: libzmq tells neither the sender, only a socket's monitor.

A peer that refuses our key ends the attempt for good: libzmq does not try again. A peer that cannot even read our
handshake (other keys, or no pipeline at all) hangs up, and libzmq tries for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from omni_actors.errors import OmniError, Unauthorized
from omni_actors.transport.curve import MAKE_KEYS, Keys

HANG_UPS = 3  # in a row,
HANG_UP_SECONDS = 2.0  # and over this time, mean more than a peer that was just going away
WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Verdict:
    """What the events of one connection amount to. Pure."""

    def __init__(self, endpoint: str, keys: Keys | None) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._hang_ups = 0
        self._first = 0.0
        self._refused: tuple[str, str] | None = None
        self.final = False  # whether the socket is of no use any more
        self._up = False
        self.departed = False  # whether a connection that was up has been lost; whoever reads it may take it back

    @property
    def refusal(self) -> OmniError | None:
        """Why nothing gets through, a new error each time; `None` while there is hope."""
        return Unauthorized(self._refused[0], hint=self._refused[1]) if self._refused is not None else None

    def on(self, event: int, now: float) -> None:
        """Take note of a monitor event."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._hang_ups, self._refused, self._up = 0, None, True
        elif event == zmq.EVENT_DISCONNECTED:  # follows on a handshake that failed, too
            self._up, self.departed = False, self.departed or self._up
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refuse("does not allow this key", "Ask its operator whether the key was revoked.", final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and self._keys is None:
            self._refuse("asks for keys, and none were given", "Give the folder of keys for it.", final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            hint = f"Connect without keys; or start it with keys. {MAKE_KEYS}."
            self._refuse("has no keys, and keys were given here", hint, final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._hang_ups += 1
            if self._hang_ups == 1:
                self._first = now
            if self._hang_ups >= HANG_UPS and now - self._first >= HANG_UP_SECONDS:
                self._refuse_by_hanging_up()

    def _refuse_by_hanging_up(self) -> None:
        """Its last words, if it had any, may have been lost with the connection."""
        if self._keys is None:
            reason, hint = "it asks for keys, and none were given", "Give the folder of keys for it"
        else:
            reason, hint = "it has other keys", f"Compare cluster.key in {self._keys.folder} with its own"
        hint += ", and check that the endpoint is right."
        self._refuse(f"hangs up during the handshake: {reason}, or it is no pipeline", hint, final=False)

    def _refuse(self, what: str, hint: str, final: bool) -> None:
        self._refused = (f"The peer at {self._endpoint} {what}.", hint)
        self.final = final


class Handshake:
    """Watches a socket from before it connects: a refusal may come, and be the last event, within a millisecond.

    Made by `Sockets`. Belongs to the socket's thread; close it before the socket.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, keys: Keys | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._watched = socket
        self._clock = clock
        self.verdict = Verdict(endpoint, keys)
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(WATCHED)  # readable when there is news
        self.socket.setsockopt(zmq.LINGER, 0)

    def take(self) -> OmniError | None:
        """Read the events that have come; why the peer cannot be reached, if that is certain."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return self.verdict.refusal
            self.on(frames)

    def on(self, frames: Sequence[bytes]) -> None:
        """Take note of one message of the monitor."""
        self.verdict.on(int(parse_monitor_message(list(frames))["event"]), self._clock())

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        self.socket.close()
