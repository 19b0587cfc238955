"""Runs inside a fresh network namespace: makes a host of it and keeps it alive until standard input closes.

Usage: `network_host.py ADDRESS/PREFIX SOCKET`. It sends its network device over the Unix socket with that descriptor.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
DEVICE = "omni0"


def main() -> None:
    address, descriptor = sys.argv[1], int(sys.argv[2])
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for command in (
        ["link", "set", "lo", "up"],
        ["address", "add", address, "dev", DEVICE],
        ["link", "set", DEVICE, "up", "mtu", "1500"],
    ):
        subprocess.run(["ip", *command], check=True, timeout=10)
    with socket.socket(fileno=descriptor) as parent:
        socket.send_fds(parent, [b"device"], [device])
    os.close(device)
    sys.stdin.read()


if __name__ == "__main__":
    main()
