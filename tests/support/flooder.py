"""A client that submits long requests and reads nothing: `python -m tests.support.flooder ENDPOINT REQUESTS`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from omni_actors.protocol.codec import encode
from omni_actors.protocol.fields import Header, pack_token_ids
from omni_actors.protocol.messages import Submit
from omni_actors.protocol.payloads import Prompt
from omni_actors.transport.sockets import Sockets, try_send
from tests.support.paths import REPOSITORY
from tests.support.waiting import until

TOKENS = 4000  # of each request


@contextmanager
def flooding(endpoint: str, requests: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has submitted so many requests. It ends with the block at the latest."""
    command = [sys.executable, "-m", "tests.support.flooder", endpoint, str(requests)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"submitted\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _main(endpoint: str, requests: int) -> None:
    dealer = Sockets().dealer(endpoint, b"flooder %d" % requests)[0]
    body = Submit(prompt=Prompt(token_ids=pack_token_ids([120] * TOKENS)), modalities=("text", "audio"))
    for number in range(requests):
        frames = encode(Header("", f"flood {requests} {number}"), body)
        until(lambda frames=frames: try_send(dealer, frames), what="the coordinator takes a request")
    print("submitted", flush=True)
    signal.pause()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
