"""Makes pictures of several prompts at once through the client library, and shows how far each of them is.

omni-actors launch echo_image --run-dir /tmp/omni
python examples/client_images.py ipc:///tmp/omni/client "A lighthouse at night" "A boat in the fog" --steps 20
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from PIL import Image as Pillow

from omni_actors import AsyncOmniClient
from omni_actors.client import Image, Progress
from omni_actors.errors import OmniError


async def draw(client: AsyncOmniClient, number: int, prompt: str, options: argparse.Namespace) -> None:
    steps = {"num_steps": options.steps}
    # Each stage declares what it takes; what a request does not set is the model's default.
    parameters = (await client.describe()).parameters
    stage = next(name for name, those in parameters.items() if any(one.name == "num_steps" for one in those))
    stream = await client.submit(
        prompt, modalities=["image"], params={stage: steps}, seed=options.seed + number, timeout=600
    )
    file = options.folder / f"{number}.png"
    async for item in stream:
        if isinstance(item, Progress):
            print(f"{number}: step {item.step} of {item.steps}")
        elif isinstance(item, Image) and not item.preview:
            Pillow.fromarray(item.pixels).save(file)
            print(f"{number}: {file}, {item.pixels.shape[1]} x {item.pixels.shape[0]} pixels")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", help="the endpoint that the launcher prints")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    async with AsyncOmniClient(options.endpoint) as client:
        await asyncio.gather(*(draw(client, number, prompt, options) for number, prompt in enumerate(options.prompts)))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except OmniError as error:  # its text says what happened and what to do
        raise SystemExit(f"{error.code.value}: {error}") from None
