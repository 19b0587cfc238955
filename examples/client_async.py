"""Streams several requests at once over one connection, and aborts one of them early.

python examples/client_async.py ipc:///tmp/omni/client "Why is the sea salt?" "And the rivers?" --abort-after 5
"""

from __future__ import annotations

import argparse
import asyncio
import time

from omni_actors import AsyncOmniClient
from omni_actors.client import Audio
from omni_actors.errors import Aborted


async def follow(client: AsyncOmniClient, number: int, prompt: str, abort_after: int | None) -> None:
    """Print one answer. With `abort_after`, abort it in every stage after that many pieces of text."""
    began = time.perf_counter()
    stream = await client.submit(prompt, seed=number, timeout=120)
    words, seconds, first_audio = [], 0.0, None
    try:
        async for item in stream:
            if isinstance(item, Audio):
                first_audio = first_audio or time.perf_counter() - began
                seconds += len(item.samples) / item.sample_rate
                continue
            words.append(item.text)
            if abort_after is not None and len(words) == abort_after:
                await stream.abort()
    except Aborted:
        print(f"[{number}] aborted after {''.join(words)!r}")
        return
    sound = f", {seconds:.2f} s of audio, the first after {first_audio:.3f} s" if first_audio else ""
    print(f"[{number}] {''.join(words)!r}{sound}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", help="the endpoint that the launcher prints")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--abort-after", type=int, help="abort the last request after this many pieces of text")
    options = parser.parse_args()
    last = len(options.prompts) - 1
    async with AsyncOmniClient(options.endpoint) as client, asyncio.TaskGroup() as tasks:
        for number, prompt in enumerate(options.prompts):
            tasks.create_task(follow(client, number, prompt, options.abort_after if number == last else None))


if __name__ == "__main__":
    asyncio.run(main())
