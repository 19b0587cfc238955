"""Chats with a pipeline through the `openai` package: a whole answer, a stream, a picture.

omni-actors launch tiny_qwen2_5_omni --http 127.0.0.1:8000
python examples/openai_chat.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--key", default="none", help="the server's OMNI_ACTORS_API_KEY, if it has one")
    parser.add_argument("--image", type=Path, help="a PNG, JPEG or WEBP file to ask about")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url.rstrip('/').removesuffix('/v1')}/v1", api_key=options.key)
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sea salt?"}],
        max_tokens=options.max_tokens,
        temperature=0.7,
        seed=1,
    )
    print("whole:   ", answer.choices[0].message.content)
    print("tokens:  ", answer.usage.prompt_tokens, "in,", answer.usage.completion_tokens, "out")

    print("streamed: ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "And the rivers?"}],
        stream=True,
        # What OpenAI has no field for goes through extra_body, by stage.
        extra_body={"stage_params": {"thinker": {"max_tokens": options.max_tokens, "repetition_penalty": 1.05}}},
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    if options.image is not None:
        kind = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(options.image.suffix.lower(), "png")
        data = base64.b64encode(options.image.read_bytes()).decode()
        answer = client.chat.completions.create(
            model=model,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}},
                        {"type": "text", "text": "What is in this picture?"},
                    ],
                }
            ],
            max_tokens=options.max_tokens,
        )
        print("picture: ", answer.choices[0].message.content)


if __name__ == "__main__":
    main()
