"""Measures the host time that our hooks add to a step of the thinker or the talker, against bare vLLM.

    python benchmarks/ar_step.py DIR --stage talker --batch 8 32 --set load_format=dummy

Both run in the same engine core of one process; "bare" requests carry no payload, so that only vLLM's own code runs.
Prints milliseconds per decode step (median) and, with `--profile`, where the host's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable

from omni_actors.engine.platform import prepare

prepare()

import command_line  # noqa: E402
import torch  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.autoregressive import AutoregressiveEngine  # noqa: E402
from omni_actors.engine.core import make_request  # noqa: E402
from omni_actors.engine.tensors import to_host  # noqa: E402
from omni_actors.protocol.payloads import StageParams  # noqa: E402
from omni_actors.stage.engine_interface import StageInputs, StageRequest  # noqa: E402

PROMPT = 200
WARM = 20  # steps left out: prefill and the first decodes


def start_ours(engine: AutoregressiveEngine, stage: str, index: int, count: int) -> None:
    params = StageParams(max_tokens=count, min_tokens=count)
    request = StageRequest(f"ours-{index}", params, seed=index)
    if stage == "thinker":
        engine.start(request, StageInputs(token_ids=list(range(1, PROMPT + 1))))
        return
    width, dtype = engine.adapter.row_width, engine.adapter.row_dtype
    rows = torch.randn(PROMPT + 65, width).to(dtype)
    tensors = {"prompt_rows": to_host(rows[: PROMPT + 1]), "reply_rows": to_host(rows[PROMPT + 1 :])}
    engine.start(request, StageInputs(tensors=tensors))


def start_bare(engine: AutoregressiveEngine, stage: str, index: int, count: int) -> None:
    defaults = engine.adapter.defaults
    params = SamplingParams(
        max_tokens=count,
        min_tokens=count,
        temperature=defaults.temperature or 0.0,
        top_p=defaults.top_p or 1.0,
        top_k=defaults.top_k or 0,
        repetition_penalty=defaults.repetition_penalty or 1.0,
        detokenize=False,
        seed=index,
        stop_token_ids=sorted(getattr(engine.adapter, "_ends", [])),
    )
    request = make_request(f"bare-{index}", list(range(1, PROMPT + 1)), params)
    if stage == "talker":
        width, dtype = engine.adapter.row_width, engine.adapter.row_dtype
        request.prompt_embeds = torch.randn(PROMPT, width).to(dtype)
    engine.core.add(engine.core.prepare(request))


def steps_of(engine: AutoregressiveEngine, step: Callable[[], object]) -> list[float]:
    times = []
    while engine.runnable():
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


def main(options: argparse.Namespace) -> None:
    fields = command_line.fields(options)
    config = OmniModelConfig(options.checkpoint, options.stage, steps_per_schedule=1)
    defaults = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    engine = AutoregressiveEngine(OmniEngineArgs(config, "autoregressive", {**defaults, **fields}))
    for batch in options.batch:
        line: dict[str, float | int | str] = {"stage": options.stage, "batch": batch}
        for _ in range(2):  # the first round warms up
            for name, start, step in (("bare", start_bare, engine.core.step), ("ours", start_ours, engine.step)):
                for index in range(batch):
                    start(engine, options.stage, index, options.tokens)
                line[f"{name}_ms"] = round(1000 * statistics.median(steps_of(engine, step)[WARM:-WARM]), 3)
        line["added_ms"] = round(line["ours_ms"] - line["bare_ms"], 3)
        print(json.dumps(line), flush=True)
        if options.profile:
            for index in range(batch):
                start_ours(engine, options.stage, index, options.tokens)
            profile = cProfile.Profile()
            profile.enable()
            steps = len(steps_of(engine, engine.step))
            profile.disable()
            print(f"profile of {steps} steps", file=sys.stdout)
            pstats.Stats(profile, stream=sys.stdout).sort_stats(options.profile).print_stats(45)
    engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--stage", choices=["thinker", "talker"], default="talker")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, default=200)
    command_line.add_fields(parser)
    parser.add_argument("--profile", choices=["tottime", "cumtime"])
    main(parser.parse_args())
