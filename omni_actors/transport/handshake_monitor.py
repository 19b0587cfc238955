"""Reports why a connection does not come up, and that it was lost. libzmq tells only a socket's monitor.

A peer that refuses our key ends the attempt for good: libzmq does not try again. A peer that cannot read our handshake
(other keys, or not a pipeline at all) hangs up, and libzmq tries forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from omni_actors.errors import OmniError, Unauthorized
from omni_actors.transport.curve import MAKE_KEYS, Keys

HANG_UPS = 3  # this many in a row,
HANG_UP_SECONDS = 2.0  # over at least this time, are more than a peer that is just shutting down
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Verdict:
    """Concludes from a connection's events whether it is refused or lost. Pure.

    Attributes:
        final: the socket will never connect.
        connected: there is an established connection.
        disconnected: one was lost. Its reader may reset it.
    """

    def __init__(self, endpoint: str, keys: Keys | None) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._hang_ups = 0
        self._first_hang_up = 0.0
        self._refusal: tuple[str, str] | None = None
        self.connected = False
        self.final = False
        self.disconnected = False

    @property
    def refusal(self) -> OmniError | None:
        """Why nothing gets through, as a new error each time; `None` while it may still connect."""
        return Unauthorized(self._refusal[0], hint=self._refusal[1]) if self._refusal is not None else None

    def on(self, event: int, now: float) -> None:
        """Take note of a monitor event."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._hang_ups, self._refusal, self.connected = 0, None, True
        elif event == zmq.EVENT_DISCONNECTED:  # also follows a failed handshake
            self.disconnected = self.disconnected or self.connected
            self.connected = False
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refuse("does not allow this key", "Ask its operator whether the key was revoked.", final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and self._keys is None:
            self._refuse("asks for keys, and none were given", "Give the folder of keys for it.", final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            hint = f"Connect without keys; or start it with keys. {MAKE_KEYS}."
            self._refuse("has no keys, and keys were given here", hint, final=True)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._first_hang_up = self._first_hang_up if self._hang_ups else now
            self._hang_ups += 1
            if self._hang_ups >= HANG_UPS and now - self._first_hang_up >= HANG_UP_SECONDS:
                self._refuse_by_hang_ups()

    def _refuse_by_hang_ups(self) -> None:
        """Name the likely reasons: the peer gave none, or it was lost with the connection."""
        if self._keys is None:
            reason, hint = "it asks for keys, and none were given", "Give the folder of keys for it"
        else:
            reason, hint = "it has other keys", f"Compare cluster.key in {self._keys.folder} with its own"
        hint += ", and check that the endpoint is right."
        self._refuse(f"hangs up during the handshake: {reason}, or it is not a pipeline", hint, final=False)

    def _refuse(self, what: str, hint: str, final: bool) -> None:
        self._refusal = (f"The peer at {self._endpoint} {what}.", hint)
        self.final = final


class HandshakeMonitor:
    """Monitors a socket from before it connects: a refusal may be the only event, a millisecond later.

    Belongs to the socket's thread; close it before the socket. `socket` is readable when there are events.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, keys: Keys | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._monitored = socket
        self._clock = clock
        self.verdict = Verdict(endpoint, keys)
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(EVENTS)
        self.socket.setsockopt(zmq.LINGER, 0)

    def take(self) -> OmniError | None:
        """Read the events that have arrived and return why the peer cannot be reached, if that is certain."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return self.verdict.refusal
            self.on(frames)

    def on(self, frames: Sequence[bytes]) -> None:
        """Take note of one message read from `socket`."""
        self.verdict.on(int(parse_monitor_message(list(frames))["event"]), self._clock())

    def close(self) -> None:
        """Stop monitoring. The monitored socket stays open."""
        if not self._monitored.closed:
            self._monitored.disable_monitor()
        self.socket.close()
