"""Makes a voice of a recording, has a text spoken with it, and deletes it, through the `openai` package.

omni-actors launch echo_speech --http 127.0.0.1:8000
python examples/openai_speech.py --url http://127.0.0.1:8000 --recording examples/question.wav --speech speech.wav

With a model that has voices of its own give one with --voice and no recording.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from openai import OpenAI

SAMPLE_RATE = 24_000  # of pcm
NAME = "example"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--key", default="none", help="the server's OMNI_ACTORS_API_KEY, if it has one")
    parser.add_argument("--text", default="The tide is full.")
    parser.add_argument("--recording", type=Path, help="of the voice to speak with, 0.5 to 30 s")
    parser.add_argument("--transcript", help="what is said in the recording")
    parser.add_argument("--voice", default="default", help="a voice of the model, if there is no recording")
    parser.add_argument("--language", default="auto")
    parser.add_argument("--speech", type=Path, default=Path("speech.wav"))
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url.rstrip('/').removesuffix('/v1')}/v1", api_key=options.key)
    model = client.models.list().data[0].id

    voice = options.voice
    if options.recording is not None:
        more = {"transcript": options.transcript} if options.transcript else {}
        made = client.audio.voices.create(name=NAME, audio_sample=options.recording, consent="mine", extra_body=more)
        voice = made.name
        print(f"made the voice {made.name}, {made.id}")
    try:
        began = time.perf_counter()
        first = 0.0
        with (
            options.speech.open("wb") as file,
            client.audio.speech.with_streaming_response.create(
                model=model,
                input=options.text,
                voice=voice,
                response_format="wav",
                extra_body={"language": options.language},
            ) as response,
        ):
            for piece in response.iter_bytes(4096):
                first = first or time.perf_counter() - began
                file.write(piece)
        print(f"{options.speech}: the first sound after {first:.2f} s")
    finally:
        if options.recording is not None:
            client.delete(f"/audio/voices/{voice}", cast_to=object)
            print(f"deleted the voice {voice}")


if __name__ == "__main__":
    main()
