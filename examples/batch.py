"""Answers every line of a JSONL file, and resumes where it stopped.

    python examples/batch.py stage_configs/tiny_qwen2_5_omni.yaml prompts.jsonl answers.jsonl --audio-folder sounds

Input line: {"id": "a", "prompt": "Why is the sea salt?", "voice": "Ethan", "seed": 7} (the last two are optional).
Output line: {"id": "a", "text": ..., "audio": "sounds/a.wav", "seconds": 1.5}, or {"id": "a", "error": code, ...}.
Give a YAML file to start a pipeline, or the endpoint of a running one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any, TextIO

import soundfile

from omni_actors import AsyncOmniClient, OmniLLM
from omni_actors.errors import OmniError


async def answer(client: AsyncOmniClient, line: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Answer one line. An error counts as an answer, so that the other lines continue."""
    try:
        output = await client.generate(
            line["prompt"],
            modalities=["text", "audio"] if folder is not None else ["text"],
            voice=line.get("voice"),
            seed=line.get("seed"),
            timeout=600,
        )
    except OmniError as error:
        return {"id": line["id"], "error": error.code.value, "message": str(error)}
    result: dict[str, Any] = {"id": line["id"], "text": output.text}
    if folder is not None and output.audio is not None:
        file = folder / f"{line['id']}.wav"
        soundfile.write(file, output.audio, output.sample_rate)
        result |= {"audio": str(file), "seconds": round(len(output.audio) / output.sample_rate, 3)}
    return result


async def run(endpoint: str, lines: list[dict[str, Any]], sink: TextIO, folder: Path | None) -> None:
    """Answer as many lines at a time as the pipeline admits; write each when it is complete."""
    async with AsyncOmniClient(endpoint) as client:
        slots = asyncio.Semaphore((await client.describe()).max_in_flight)

        async def one(line: dict[str, Any]) -> None:
            async with slots:
                sink.write(json.dumps(await answer(client, line, folder), ensure_ascii=False) + "\n")
                sink.flush()

        async with asyncio.TaskGroup() as tasks:
            for line in lines:
                tasks.create_task(one(line))


def read(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="a YAML file, or the endpoint of a running pipeline")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--audio-folder", type=Path, help="also speak the answers, and write the audio here")
    options = parser.parse_args()
    done = {line["id"] for line in read(options.answers) if "error" not in line}
    lines = [line for line in read(options.prompts) if line["id"] not in done]
    if options.audio_folder is not None:
        options.audio_folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        endpoint = options.pipeline
        if "://" not in endpoint:
            endpoint = stack.enter_context(OmniLLM(endpoint)).endpoint
        sink = stack.enter_context(options.answers.open("a", encoding="utf-8"))
        asyncio.run(run(endpoint, lines, sink, options.audio_folder))
    print(f"{len(lines)} answered, {len(done)} were there")


if __name__ == "__main__":
    main()
