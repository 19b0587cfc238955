"""Speak a WAV file to a realtime session, and write the answer to another one.

    python examples/realtime_wav.py examples/question.wav answer.wav --url http://127.0.0.1:8000

Needs `pip install "openai[realtime]" soundfile soxr`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import time

import numpy
import soundfile
import soxr
from openai import AsyncOpenAI

RATE = 24_000
PIECE = RATE // 25  # samples: 40 ms


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("answer")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    parser.add_argument("--key", default="none")
    parser.add_argument("--voice")
    parser.add_argument("--instructions", default="Answer in one sentence.")
    parser.add_argument("--at-once", action="store_true", help="do not wait as a speaker would")
    options = parser.parse_args()

    sound, rate = soundfile.read(options.question, dtype="float32", always_2d=True)
    samples = soxr.resample(sound.mean(axis=1), rate, RATE)
    question = (samples.clip(-1, 1) * 32767).astype("<i2")

    url = f"{options.url.rstrip('/').removesuffix('/v1')}/v1"
    async with AsyncOpenAI(base_url=url, api_key=options.key).realtime.connect() as connection:
        output = {"voice": options.voice} if options.voice else {}
        await connection.session.update(
            session={
                "type": "realtime",
                "instructions": options.instructions,
                "audio": {"input": {"turn_detection": None}, "output": output},
            }
        )
        for start in range(0, len(question), PIECE):
            piece = question[start : start + PIECE].tobytes()
            await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
            if not options.at_once:
                await asyncio.sleep(PIECE / RATE)
        asked = time.monotonic()
        await connection.input_audio_buffer.commit()
        await connection.response.create()

        pcm, text = b"", ""
        async for event in connection:
            if event.type == "response.output_audio.delta":
                if not pcm:
                    print(f"first sound after {time.monotonic() - asked:.2f} s")
                pcm += base64.b64decode(event.delta)
            elif event.type == "response.output_audio_transcript.delta":
                text += event.delta
            elif event.type == "error":
                raise SystemExit(event.error.message)
            elif event.type == "response.done":
                break
    soundfile.write(options.answer, numpy.frombuffer(pcm, "<i2"), RATE)
    print(f"{len(pcm) / 2 / RATE:.2f} s in {options.answer}: {text}")


if __name__ == "__main__":
    asyncio.run(main())
