"""Compares the thinker alone through omni_actors with bare vLLM on the same checkpoint, in one run.

    python benchmarks/vs_vllm.py stage_configs/qwen2_5_omni.yaml --model DIR --concurrency 1 8 32

Bare vLLM is an `AsyncLLM` in its own process, with the engine arguments of the configuration's thinker. Both get the
same conversation as text and answer with the same number of tokens, text only. Prints both tables and the ratio ours :
vLLM's (the goals are at least 0.98 for throughput and at most 1.05 for TTFT). `--turns 2` alternates twice, which shows
how much one system varies.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from typing import Any

import command_line
import serve
import workload
from workload import Sample

from omni_actors import config

STAGES = ("prompt", "thinker")


async def bare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The loads against vLLM's own engine, with none of our code in its processes."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    pipeline = config.load(options.config, command_line.overrides(options)).pipeline
    model, engine = pipeline.model, pipeline.stage("thinker").engine
    same = {"generation_config": "vllm", "enable_prefix_caching": True}  # as our thinker has it
    numbers = itertools.count()
    began = time.perf_counter()
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **{**same, **engine}))
    tokenizer = AutoTokenizer.from_pretrained(model)
    print(f"bare vLLM is ready after {time.perf_counter() - began:.1f} s", file=sys.stderr)
    count, kind = options.text_tokens, RequestOutputKind.DELTA
    params = SamplingParams(max_tokens=count, min_tokens=count, temperature=0.0, output_kind=kind)

    async def ask(index: int) -> Sample:
        began = time.perf_counter()
        turns = [{"role": "user", "content": workload.prompt(next(numbers), options.prompt_repeats)}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        sample = Sample()
        async for output in llm.generate(text, params, f"{index}-{began}"):
            sample.first_text = sample.first_text or time.perf_counter() - began
            sample.prompt_tokens = len(output.prompt_token_ids or ()) or sample.prompt_tokens
            sample.text_tokens += len(output.outputs[0].token_ids)
        sample.total = time.perf_counter() - began
        return sample

    try:
        loads = {f"c={count}": await workload.warm_loop(ask, count, options.rounds) for count in options.concurrency}
    finally:
        llm.shutdown()
    return [workload.summary(load, *measured) for load, measured in loads.items()]


def bare_in_a_process() -> list[dict[str, Any]]:
    """`bare` in a new interpreter, so that both systems start from scratch."""
    output = subprocess.check_output([sys.executable, *sys.argv, "--bare"], text=True)
    return json.loads(output.strip().splitlines()[-1])


async def ours(options: argparse.Namespace) -> list[dict[str, Any]]:
    async with serve.pipeline(options, stages=STAGES) as (endpoint, _):
        return await serve.measure(endpoint, options)


def ratios(ours_rows: list[dict[str, Any]], bare_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for mine, theirs in zip(ours_rows, bare_rows, strict=True):
        times = [float(row["ttft_ms"].split(" / ")[0]) for row in (mine, theirs)]
        row = {"load": mine["load"]}
        row["throughput, ours : vLLM"] = round(mine["text_tok_per_s"] / theirs["text_tok_per_s"], 3)
        rows.append(row | {"median TTFT, ours : vLLM": round(times[0] / max(times[1], 1e-9), 3)})
    return rows


def main(options: argparse.Namespace) -> None:
    if options.bare:
        print(json.dumps(asyncio.run(bare(options))))
        return
    turns = []
    for _ in range(options.turns):
        turns.append((asyncio.run(ours(options)), bare_in_a_process()))
        for name, rows in zip(("omni_actors, thinker alone", "bare vLLM"), turns[-1], strict=True):
            print(f"\n{name}\n\n{workload.table(rows)}", flush=True)
        print(f"\n{workload.table(ratios(*turns[-1]))}", flush=True)
    if options.json:
        rows = [row for mine, theirs in turns for row in ratios(mine, theirs)]
        options.json.write_text(workload.report(rows, turns=turns))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    serve.add_load_arguments(parser)
    parser.set_defaults(codec_tokens=0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    main(parser.parse_args())
