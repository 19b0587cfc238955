"""Answers every line of a JSONL file, and resumes where it stopped.

    python examples/batch.py tiny_qwen2_5_omni examples/prompts.jsonl answers.jsonl --audio-folder sounds

Input line: {"id": "a", "prompt": "Why is the sea salt?", "voice": "Ethan", "seed": 7} (the last two are optional).
Output line: {"id": "a", "text": ..., "audio": "sounds/a.wav", "seconds": 1.5}, or {"id": "a", "error": code, ...}.
Give a YAML file, or the name of one that comes with the package, to start a pipeline, or the endpoint of a running one.
The exit code is 1 if a line could not be read, before anything starts, or if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, TextIO

import soundfile

from omni_actors import AsyncOmniClient, OmniLLM
from omni_actors.client.offline import progress_bar
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


async def run(endpoint: str, lines: list[dict[str, Any]], sink: TextIO, folder: Path | None) -> int:
    """Answer as many lines at a time as the pipeline admits; write each at its end. Returns how many failed."""
    failed = 0
    async with AsyncOmniClient(endpoint) as client:
        slots = asyncio.Semaphore((await client.describe()).max_in_flight)

        async def one(line: dict[str, Any]) -> None:
            nonlocal failed
            async with slots:
                answered = await answer(client, line, folder)
                failed += "error" in answered
                sink.write(json.dumps(answered, ensure_ascii=False) + "\n")
                sink.flush()
                done(1)

        with progress_bar(len(lines), use_tqdm=True) as done:
            async with asyncio.TaskGroup() as tasks:
                for line in lines:
                    tasks.create_task(one(line))
    return failed


def read(path: Path, *needed: str) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file, each with the `needed` texts. Ends the program for a line that is none."""
    found: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise SystemExit(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
        if missing := [key for key in needed if not isinstance(line, dict) or not isinstance(line.get(key), str)]:
            raise SystemExit(f"{path}, line {number}: not an object with a text as {missing[0]!r}")
        if "/" in line["id"] or line["id"] in ("", ".", ".."):
            raise SystemExit(f"{path}, line {number}: the id {line['id']!r} cannot be the name of a file")
        found.append(line)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="a YAML file, or the endpoint of a running pipeline")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--audio-folder", type=Path, help="also speak the answers, and write the audio here")
    options = parser.parse_args()
    answers = read(options.answers, "id") if options.answers.exists() else []
    done = {line["id"] for line in answers if "error" not in line}
    lines = [line for line in read(options.prompts, "id", "prompt") if line["id"] not in done]
    if options.audio_folder is not None:
        options.audio_folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        endpoint = options.pipeline
        if "://" not in endpoint:
            endpoint = stack.enter_context(OmniLLM(endpoint)).endpoint
        sink = stack.enter_context(options.answers.open("a", encoding="utf-8"))
        failed = asyncio.run(run(endpoint, lines, sink, options.audio_folder))
    print(f"{len(lines) - failed} answered, {failed} failed, {len(done)} were there")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
