"""Speak a WAV file to a realtime session, and write the answer to another one.

    python examples/realtime_wav.py examples/question.wav answer.wav --url http://127.0.0.1:8000
    python examples/realtime_wav.py examples/three_four.wav answer.wav --ask "What is the sum?"

The second one is for the checkpoint that speaks (`stage_configs/tiny_speaker.yaml`), which adds two spoken digits.

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
    parser.add_argument("--instructions", help="of the session (default: none)")
    parser.add_argument("--ask", metavar="TEXT", help="written behind the sound, which is then sent as a whole")
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
                **({"instructions": options.instructions} if options.instructions else {}),
                "audio": {"input": {"turn_detection": None}, "output": output},
            }
        )
        if options.ask:
            heard = base64.b64encode(question.tobytes()).decode()
            content = [{"type": "input_audio", "audio": heard}, {"type": "input_text", "text": options.ask}]
            await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        else:
            for start in range(0, len(question), PIECE):
                piece = question[start : start + PIECE].tobytes()
                await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
                if not options.at_once:
                    await asyncio.sleep(PIECE / RATE)
            await connection.input_audio_buffer.commit()
        asked = time.monotonic()
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
