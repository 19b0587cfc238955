"""Two hosts on one machine: network namespaces, joined by a cable that can be slow, lossy or cut.

The cable is a thread that carries IP packets between the hosts' TUN devices. It needs neither `tc netem`, which many
kernels lack, nor, where the system allows user namespaces, root; everything is gone with the processes.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HOST = Path(__file__).with_name("network_host.py")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
START_SECONDS = 10.0
PACKETS = 64  # read from one side before the other gets its turn


class Unavailable(Exception):
    """This machine allows no network namespaces; the text says why."""


class Host:
    """A network namespace with one device; its processes are started with `command` in front."""

    def __init__(self, address: str) -> None:
        self.address = address
        # As root plain namespaces; otherwise those of a user namespace in which we are root.
        self._user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._holder = subprocess.Popen(
                ["unshare", *self._user, "--net", sys.executable, str(HOST), f"{address}/24", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                text=True,
            )
            theirs.close()
            ours.settimeout(START_SECONDS)
            try:
                _, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
            except OSError:
                descriptors = []
        if not descriptors:
            self._holder.kill()
            raise Unavailable(f"no namespace for {address}: {self._holder.communicate()[1].strip()[-500:]}")
        self.device = descriptors[0]

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs a command on this host."""
        user = ["--user", "--preserve-credentials"] if self._user else []
        return ["nsenter", "--target", str(self._holder.pid), *user, "--net", *arguments]

    def close(self) -> None:
        """End the host; processes on it lose their network."""
        os.close(self.device)
        self._holder.kill()
        self._holder.communicate()


class Cable(threading.Thread):
    """Carries packets, and keeps them. `delay` (seconds, one way) and `loss` (0 to 1) may be set at any time."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(name="cable", daemon=True)
        self.delay = 0.0
        self.loss = 0.0
        self.is_cut = False
        self.carried: list[bytes] = []
        self._ends = {first: second, second: first}
        self._random = random.Random(0)
        self._waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # (due, to, packet)
        self._end = os.eventfd(0, os.EFD_NONBLOCK)

    def stop(self) -> None:
        os.eventfd_write(self._end, 1)
        self.join()
        os.close(self._end)

    def run(self) -> None:
        poller = select.poll()
        for descriptor in (*self._ends, self._end):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(self._timeout_ms())}
            if self._end in ready:
                return
            for end, other in self._ends.items():
                if end in ready:
                    self._take(end, other)
            self._deliver()

    def _timeout_ms(self) -> float | None:
        return max(0.0, 1000 * (self._waiting[0][0] - time.monotonic())) if self._waiting else None

    def _take(self, end: int, other: int) -> None:
        for _ in range(PACKETS):
            try:
                packet = os.read(end, 65536)
            except BlockingIOError:
                return
            if not self.is_cut and self._random.random() >= self.loss:
                self._waiting.append((time.monotonic() + self.delay, other, packet))

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, to, packet = self._waiting.popleft()
            if self.is_cut:
                continue
            self.carried.append(packet)
            with contextlib.suppress(BlockingIOError):  # the receiver's queue is full: networks lose packets then
                os.write(to, packet)


class Network:
    """Two hosts and their cable; a context manager.

    Raises:
        Unavailable: no namespaces here.
    """

    def __init__(self) -> None:
        for program in ("unshare", "nsenter", "ip"):
            if shutil.which(program) is None:
                raise Unavailable(f"{program} is not installed (Debian: util-linux and iproute2)")
        if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            raise Unavailable("/dev/net/tun cannot be used here")
        self.hosts: list[Host] = []
        try:
            for address in ADDRESSES:
                self.hosts.append(Host(address))
        except Unavailable:
            self._close_hosts()
            raise
        self.cable = Cable(*(host.device for host in self.hosts))
        self.cable.start()

    def heal(self) -> None:
        """A cable like new."""
        self.cable.is_cut, self.cable.delay, self.cable.loss = False, 0.0, 0.0

    def close(self) -> None:
        self.cable.stop()
        self._close_hosts()

    def _close_hosts(self) -> None:
        for host in self.hosts:
            host.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
