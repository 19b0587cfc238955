"""Makes a picture through the `openai` package and saves the previews on the way, then makes another one of it.

omni-actors launch echo_image --http 127.0.0.1:8000
python examples/openai_images.py --url http://127.0.0.1:8000 --prompt "A lighthouse at night" --size 512x512 --steps 20
"""

from __future__ import annotations

import argparse
import base64
import time
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--key", default="none", help="the server's OMNI_ACTORS_API_KEY, if it has one")
    parser.add_argument("--prompt", default="A lighthouse at night")
    parser.add_argument("--edit", default="The same in daylight")
    parser.add_argument("--size", default="auto", help="such as 512x512")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url.rstrip('/').removesuffix('/v1')}/v1", api_key=options.key)
    ours = {"seed": options.seed, "num_inference_steps": options.steps}

    began = time.perf_counter()
    stream = client.images.generate(
        prompt=options.prompt, size=options.size, stream=True, partial_images=2, extra_body={**ours, "progress": True}
    )
    picture = options.folder / "picture.png"
    for event in stream:
        if event.type == "image_generation.progress":  # ours, and so not among the types of the package
            print(f"\rstep {event.step} of {event.steps}", end="", flush=True)
        elif event.type == "image_generation.partial_image":
            preview = options.folder / f"preview{event.partial_image_index}.png"
            preview.write_bytes(base64.b64decode(event.b64_json))
        else:
            picture.write_bytes(base64.b64decode(event.b64_json))
            seconds = time.perf_counter() - began
            print(f"\n{picture}: {event.size}, {event.usage.output_tokens} tokens, {seconds:.2f} s")

    answer = client.images.edit(prompt=options.edit, image=picture, size=options.size, extra_body=ours)
    edited = options.folder / "edited.png"
    edited.write_bytes(base64.b64decode(answer.data[0].b64_json))
    print(f"{edited}: {answer.size}")


if __name__ == "__main__":
    main()
