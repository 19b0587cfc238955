"""One end of a connection between two hosts: `network_peer.py receive|send ENDPOINT KEYS [COUNT]`.

`send` numbers its messages, one every 10 ms; `receive` prints every number that comes, with its time.
"""

from __future__ import annotations

import sys
import time

from omni_actors.transport.curve import load_keys
from omni_actors.transport.link import Link
from omni_actors.transport.sockets import Sockets, drain

INTERVAL = 0.01


def main() -> None:
    what, endpoint, keys = sys.argv[1:4]
    sockets = Sockets(keys=load_keys(keys))
    if what == "receive":
        receive(sockets, endpoint)
    else:
        send(sockets, endpoint, int(sys.argv[4]))


def receive(sockets: Sockets, endpoint: str) -> None:
    inbox, _ = sockets.pull(endpoint)
    print("listening", flush=True)
    while True:
        inbox.poll(1000)
        for frames in drain(inbox):
            print(f"got {bytes(frames[0]).decode()} {time.monotonic():.3f}", flush=True)


def send(sockets: Sockets, endpoint: str, count: int) -> None:
    link = Link(sockets.push(endpoint), time.monotonic)
    for number in range(count):
        link.send("", [str(number).encode(), bytes(2000)])
        time.sleep(INTERVAL)
        link.flush()
    deadline = time.monotonic() + 30
    while link.backlog and time.monotonic() < deadline:
        time.sleep(INTERVAL)
        link.flush()
    print("sent", flush=True)
    time.sleep(30)  # what is in zmq's queue leaves; the test ends this process


if __name__ == "__main__":
    main()
