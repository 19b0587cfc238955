"""Shows whether CUDA graphs and compilation change a pipeline's answers: the same requests, eagerly and with graphs.

    python benchmarks/graphs_equal_eager.py stage_configs/tiny_qwen2_5_omni.yaml

Requests join and leave while others run. Prints, for each variant against eager: requests with equal thinker tokens,
with equal audio (within 1 % of the peak), and where the first difference is.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import command_line
import numpy

from omni_actors import config
from omni_actors.client import AsyncOmniClient
from omni_actors.client.streams import OmniRequestOutput
from omni_actors.launch import Launcher

TEXTS = ["Hi", "What is the capital of France?", "Tell me, in a few words, why the sea is salt.", "One two three " * 12]
STAGES = ("thinker", "talker")
SAMPLES_PER_TOKEN = 480
VARIANTS = {
    "eager": {"enforce_eager": "true"},
    "default": {"enforce_eager": "false"},
    "full graphs, no compile": {
        "enforce_eager": "false",
        "compilation_config": '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}',
    },
}


async def answers(options: argparse.Namespace, variant: dict[str, str]) -> tuple[list[OmniRequestOutput], float, float]:
    overrides = {f"stages.{stage}.engine.{key}": value for stage in STAGES for key, value in variant.items()}
    overrides |= command_line.overrides(options)
    launcher = Launcher(config.load(Path(options.config), overrides).pipeline)
    try:
        began = time.perf_counter()
        await launcher.start()
        ready = time.perf_counter() - began
        async with AsyncOmniClient(launcher.endpoint) as client:

            async def ask(index: int) -> OmniRequestOutput:
                await asyncio.sleep(0.05 * index)
                thinker, talker = 12 + 3 * (index % 5), 20 + 9 * (index % 4)
                params = {"thinker": {"max_tokens": thinker}, "talker": {"max_tokens": talker}}
                voice = ("Chelsie", "Ethan")[index % 2]
                return await client.generate(TEXTS[index % 4], voice=voice, seed=index, params=params, timeout=120)

            began = time.perf_counter()
            outputs = await asyncio.gather(*(ask(index) for index in range(options.requests)))
            return outputs, ready, time.perf_counter() - began
    finally:
        await launcher.close()


def first_difference(output: OmniRequestOutput, reference: OmniRequestOutput) -> int | None:
    """Index of the first codec token whose samples differ by more than 1 % of the peak; `None` if all agree."""
    if output.audio is None or reference.audio is None or len(output.audio) != len(reference.audio):
        return 0
    apart = numpy.abs(output.audio - reference.audio) > 0.01 * numpy.abs(reference.audio).max()
    return int(apart.argmax()) // SAMPLES_PER_TOKEN if apart.any() else None


def compare(name: str, outputs: list[OmniRequestOutput], reference: list[OmniRequestOutput]) -> str:
    pairs = list(zip(outputs, reference, strict=True))
    tokens = sum(a.token_ids == b.token_ids for a, b in pairs)
    differences = [first_difference(a, b) for a, b in pairs]
    same = sum(difference is None for difference in differences)
    where = [difference for difference in differences if difference is not None]
    return f"| {name} | {tokens}/{len(pairs)} | {same}/{len(pairs)} | {where or '-'} |"


async def main(options: argparse.Namespace) -> None:
    results = {}
    for name, variant in VARIANTS.items():
        outputs, ready, wall = await answers(options, variant)
        print(f"{name}: ready after {ready:.1f} s, {options.requests} requests in {wall:.2f} s", flush=True)
        results[name] = outputs
    print("| variant | equal text | equal audio | first different codec token |\n|---|---|---|---|")
    for name in VARIANTS:
        print(compare(name, results[name], results["eager"]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    command_line.add_flags(parser)
    parser.add_argument("--requests", type=int, default=12)
    asyncio.run(main(parser.parse_args()))
