"""Answers fixed prompts with fixed seeds, and compares what two versions of vLLM, a driver or a kernel make of them.

    python benchmarks/answers.py stage_configs/qwen2_5_omni.yaml --model DIR --out before
    python benchmarks/answers.py stage_configs/qwen2_5_omni.yaml --model DIR --out after
    python benchmarks/answers.py --compare before after

Every prompt (text, audio, image, video) is answered greedily and with the sampling of the YAML, first one request at a
time, then all together. Sound shows the talker's tokens: with other tokens it is another sound, with the same ones it
differs by rounding. `--out FOLDER` gets answers.json, with the versions, and sound.npz.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import command_line
import numpy
import serve
import workload

from omni_actors.client import AsyncOmniClient
from omni_actors.client.streams import OmniRequestOutput

SECONDS = 2.0  # of the audio and of the video
GREEDY = {"temperature": 0.0}
SAME_SOUND = 1e-3  # largest difference between samples of the same tokens, as a part of the peak


def prompts() -> dict[str, dict[str, Any]]:
    """The prompts by name, as arguments of `submit`; the same at every call."""
    noise = numpy.random.default_rng(0)
    image = noise.integers(0, 256, (112, 168, 3), numpy.uint8)
    time = numpy.arange(int(SECONDS * 16_000)) / 16_000
    tone = (0.3 * numpy.sin(2 * numpy.pi * 220 * time)).astype(numpy.float32)
    frames = noise.integers(0, 256, (8, 112, 112, 3), numpy.uint8)
    return {
        "short text": {"prompt": "Why is the sea salt?"},
        "long text": {"prompt": workload.prompt(0, 40)},
        "audio": {"prompt": "What do you hear?", "audios": [(tone, 16_000)]},
        "image": {"prompt": "What do you see?", "images": [image]},
        "video": {"prompt": "What happens?", "videos": [(frames, len(frames) / SECONDS)]},
    }


def cases(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every prompt with both kinds of sampling."""
    lengths = {"thinker": options.text_tokens, "talker": options.codec_tokens}
    found = {}
    for name, arguments in prompts().items():
        for kind, sampling in (("greedy", GREEDY), ("sampled", {})):
            params = {stage: {**sampling, "max_tokens": count} for stage, count in lengths.items()}
            found[f"{name}, {kind}"] = {**arguments, "params": params, "seed": 7, "timeout": options.timeout}
    return found


async def answers(endpoint: str, options: argparse.Namespace) -> dict[str, OmniRequestOutput]:
    """The answers by case, each alone and all together."""
    async with AsyncOmniClient(endpoint) as client:
        given = cases(options)
        alone = {f"{name}, alone": await client.generate(**arguments) for name, arguments in given.items()}
        batch = await asyncio.gather(*(client.generate(**arguments) for arguments in given.values()))
        return alone | {f"{name}, together": answer for name, answer in zip(given, batch, strict=True)}


def save(folder: Path, found: Mapping[str, OmniRequestOutput]) -> None:
    """Write answers.json and sound.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = {name: answer.token_ids for name, answer in found.items()}
    report = {"versions": workload.versions(), "tokens": tokens}
    (folder / "answers.json").write_text(json.dumps(report, indent=1) + "\n")
    numpy.savez(folder / "sound.npz", **{name: answer.audio for name, answer in found.items()})


def compare(before: Path, after: Path) -> str:
    """A table with a row per case: equal tokens of the text, and the difference of the sound."""
    texts = [json.loads((folder / "answers.json").read_text()) for folder in (before, after)]
    sounds = [numpy.load(folder / "sound.npz") for folder in (before, after)]
    lines = [f"before: {texts[0]['versions']}", f"after:  {texts[1]['versions']}", ""]
    lines += ["| case | equal text tokens | sound | largest difference / peak |", "|---|---|---|---|"]
    for name, first in texts[0]["tokens"].items():
        second = texts[1]["tokens"][name]
        equal = next((at for at, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1), len(first))
        lines.append(f"| {name} | {equal}/{len(first)} | {' | '.join(sound(*(each[name] for each in sounds)))} |")
    return "\n".join(lines)


def sound(before: numpy.ndarray, after: numpy.ndarray) -> tuple[str, str]:
    """What is to be said of two sounds, and their largest difference as a part of the peak."""
    if len(before) != len(after):
        return f"other length: {len(before)}, {len(after)} samples", "-"
    if numpy.array_equal(before, after):
        return "equal bits", "0"
    difference = float(numpy.abs(before - after).max() / max(numpy.abs(before).max(), 1e-12))
    return "same tokens" if difference < SAME_SOUND else "other tokens", f"{difference:.1e}"


async def run(options: argparse.Namespace) -> None:
    """Start the pipeline, ask, save."""
    async with serve.pipeline(options) as (endpoint, _):
        save(options.out, await answers(endpoint, options))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    command_line.add_flags(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--text-tokens", type=int, default=32)
    parser.add_argument("--codec-tokens", type=int, default=128)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.compare:
        print(compare(*options.compare))
    elif options.config and options.out:
        asyncio.run(run(options))
    else:
        parser.error("give a configuration and --out, or --compare")
