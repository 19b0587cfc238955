"""Three hosts on one machine: network namespaces, joined by a cable that can be slow, lossy or cut.

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
from collections.abc import Mapping
from pathlib import Path

HOST = Path(__file__).with_name("network_host.py")
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
DESTINATION = slice(16, 20)  # of an IPv4 packet
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
    """Carries packets, and keeps them. `delay` (seconds, one way) and `loss` (0 to 1) may be set at any time.

    `unplugged` are addresses of hosts that get nothing and whose packets are lost; when it `is_cut`, all are.

    Args:
        devices: those of the hosts, by address.
    """

    def __init__(self, devices: Mapping[str, int]) -> None:
        super().__init__(name="cable", daemon=True)
        self.delay = 0.0
        self.loss = 0.0
        self.is_cut = False
        self.unplugged: set[str] = set()
        self.carried: list[bytes] = []
        self._devices = {socket.inet_aton(address): device for address, device in devices.items()}
        self._random = random.Random(0)
        self._waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()  # (due, to, packet)
        self._end = os.eventfd(0, os.EFD_NONBLOCK)

    def stop(self) -> None:
        os.eventfd_write(self._end, 1)
        self.join()
        os.close(self._end)

    def run(self) -> None:
        poller = select.poll()
        for descriptor in (*self._devices.values(), self._end):
            poller.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll(self._timeout_ms())}
            if self._end in ready:
                return
            for address, device in self._devices.items():
                if device in ready:
                    self._take(address, device)
            self._deliver()

    def _timeout_ms(self) -> float | None:
        return max(0.0, 1000 * (self._waiting[0][0] - time.monotonic())) if self._waiting else None

    def _take(self, sender: bytes, device: int) -> None:
        for _ in range(PACKETS):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                return
            to = self._devices.get(packet[DESTINATION])  # none for what is for no host, such as a broadcast
            lost = self._lost(sender) or self._lost(packet[DESTINATION]) or self._random.random() < self.loss
            if to is not None and not lost:
                self._waiting.append((time.monotonic() + self.delay, to, packet))

    def _lost(self, host: bytes) -> bool:
        return self.is_cut or socket.inet_ntoa(host) in self.unplugged

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            _, to, packet = self._waiting.popleft()
            if self._lost(packet[DESTINATION]):
                continue
            self.carried.append(packet)
            with contextlib.suppress(BlockingIOError):  # the receiver's queue is full: networks lose packets then
                os.write(to, packet)


class Network:
    """Three hosts and their cable; a context manager.

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
        self.cable = Cable({host.address: host.device for host in self.hosts})
        self.cable.start()

    def heal(self) -> None:
        """A cable like new."""
        self.cable.is_cut, self.cable.delay, self.cable.loss = False, 0.0, 0.0
        self.cable.unplugged.clear()

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
