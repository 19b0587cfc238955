"""Talks to a pipeline through the `openai` package: sends a question as sound and streams the answer as sound.

omni-actors launch tiny_qwen2_5_omni --http 127.0.0.1:8000
python examples/openai_audio.py --url http://127.0.0.1:8000 --question examples/question.wav --answer answer.wav
"""

from __future__ import annotations

import argparse
import base64
import time
import wave
from pathlib import Path

from openai import OpenAI

SAMPLE_RATE = 24_000  # of pcm16 in streams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--key", default="none", help="the server's OMNI_ACTORS_API_KEY, if it has one")
    parser.add_argument("--question", type=Path, help="a WAV or MP3 file; a written question if left out")
    parser.add_argument("--answer", type=Path, default=Path("answer.wav"))
    parser.add_argument("--voice", default="Chelsie")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url.rstrip('/').removesuffix('/v1')}/v1", api_key=options.key)
    model = client.models.list().data[0].id

    content: list[dict] = [{"type": "text", "text": "Please answer in one sentence."}]
    if options.question is not None:
        data = base64.b64encode(options.question.read_bytes()).decode()
        kind = options.question.suffix.lower().removeprefix(".")
        content.insert(0, {"type": "input_audio", "input_audio": {"data": data, "format": kind}})

    began = time.perf_counter()
    first = None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": options.voice, "format": "pcm16"},
        max_tokens=options.max_tokens,
        stream=True,
    )
    seconds = 0.0
    with wave.open(str(options.answer), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        for chunk in stream:
            # `audio` is not among the fields of older versions of the package; they keep it all the same.
            audio = getattr(chunk.choices[0].delta, "audio", None) if chunk.choices else None
            if audio is None:
                continue
            audio = audio if isinstance(audio, dict) else audio.model_dump()
            print(audio.get("transcript") or "", end="", flush=True)
            if audio.get("data"):
                first = first or time.perf_counter() - began
                pcm = base64.b64decode(audio["data"])
                file.writeframes(pcm)
                seconds += len(pcm) / 2 / SAMPLE_RATE
    print(f"\n{seconds:.2f} s of audio in {options.answer}, the first after {first or 0:.2f} s")

    spoken = options.answer.with_name(f"{options.answer.stem}_spoken.wav")
    with client.audio.speech.with_streaming_response.create(
        model=model,
        voice=options.voice,
        input="The tide is full.",
        response_format="wav",
        extra_body={"stage_params": {"thinker": {"max_tokens": options.max_tokens}}},
    ) as response:
        response.stream_to_file(spoken)
    print(f"read aloud: {spoken}")


if __name__ == "__main__":
    main()
