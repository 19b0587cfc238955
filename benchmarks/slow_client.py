"""Measures the coordinator's memory while some clients do not read, under the load of others.

    python benchmarks/slow_client.py [--seconds 60]

Three clients repeatedly ask for long answers with audio and read nothing; eight others send request after request and
read them. Prints the coordinator's memory in MiB every few seconds and the number of answers read.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omni_actors.client import AsyncOmniClient
from omni_actors.protocol.codec import encode
from omni_actors.protocol.fields import Header, pack_token_ids
from omni_actors.protocol.messages import Submit
from omni_actors.protocol.payloads import Prompt
from omni_actors.transport.sockets import Sockets, try_send
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher, launched


async def run(launcher: EchoLauncher, seconds: float) -> None:
    process = psutil.Process(launcher.process.pid)
    began, done = time.monotonic(), 0
    sockets = Sockets()
    slow = [sockets.dealer(launcher.endpoint, b"slow %d" % number)[0] for number in range(3)]
    print("| second | RSS MiB | slow clients ended so far | answers to readers |\n|---|---|---|---|")
    async with AsyncOmniClient(launcher.endpoint) as client:

        async def read() -> None:
            nonlocal done
            while time.monotonic() < began + seconds:
                output = await client.generate("hello" * 4, timeout=60)
                if output.text != "hello" * 4:
                    raise SystemExit("a reader got a wrong answer")
                done += 1

        readers = [asyncio.create_task(read()) for _ in range(8)]
        number = 0
        while time.monotonic() < began + seconds:
            for socket in slow:
                number += 1
                body = Submit(prompt=Prompt(token_ids=pack_token_ids([120] * 1000)), modalities=("text", "audio"))
                try_send(socket, encode(Header("", f"slow {number}"), body))
            if number % 15 == 0:
                ended = (await client.describe()).counts.get("dropped_client_slow", 0)
                rss = process.memory_info().rss / 2**20
                print(f"| {time.monotonic() - began:.0f} | {rss:.1f} | {ended} | {done} |", flush=True)
            await asyncio.sleep(1.0)
        await asyncio.gather(*readers)
    sockets.context.destroy(linger=0)


def main(seconds: float) -> None:
    data = chain()
    for stage in data["stages"]:
        stage["engine"] = {"samples_per_token": 4800}
    with launched(data) as launcher:
        asyncio.run(run(launcher, seconds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    main(parser.parse_args().seconds)
