"""Asks one question through the client library: prints the text as it arrives and writes the speech to a file.

omni-actors launch tiny_qwen2_5_omni --run-dir /tmp/omni
python examples/client_sync.py ipc:///tmp/omni/client --audio examples/question.wav --image examples/sea.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import soundfile

from omni_actors import OmniClient
from omni_actors.client import Text
from omni_actors.errors import OmniError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", help="the endpoint that the launcher prints")
    parser.add_argument("--prompt", default="Why is the sea salt?")
    parser.add_argument("--audio", type=Path, action="append", default=[], help="a sound file to send with the prompt")
    parser.add_argument("--image", type=Path, action="append", default=[], help="a picture to send with the prompt")
    parser.add_argument("--voice", help="one of the pipeline's voices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answer", type=Path, default=Path("answer.wav"))
    options = parser.parse_args()

    with OmniClient(options.endpoint) as client:
        print("voices:", ", ".join(client.describe().voices))
        stream = client.submit(
            options.prompt,
            audios=options.audio,
            images=options.image,
            voice=options.voice,
            seed=options.seed,
            timeout=120,
        )
        pieces, rate = [], 0
        for item in stream:
            if isinstance(item, Text):
                print(item.text, end="", flush=True)
            else:
                pieces.append(item.samples)
                rate = item.sample_rate
        print()
        if pieces:
            with soundfile.SoundFile(options.answer, "w", rate, 1) as file:
                for samples in pieces:
                    file.write(samples)
            print(f"{sum(map(len, pieces)) / rate:.2f} s of audio in {options.answer}")
        for stage, usage in stream.usage.items():
            print(f"{stage}: {usage.output_tokens} out, first after {usage.first_output:.3f} s, {usage.finish_reason}")


if __name__ == "__main__":
    try:
        main()
    except OmniError as error:  # its text says what happened and what to do
        raise SystemExit(f"{error.code.value}: {error}") from None
