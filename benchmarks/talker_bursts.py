"""Measures a step of the talker of Qwen2.5-Omni for several steps per scheduling: wall, host and device time.

    python benchmarks/talker_bursts.py DIR --set load_format=dummy --set gpu_memory_utilization=0.4

One engine for all; the talker alone, without sockets. Per step of the model, milliseconds: "wall"; "host", the CPU time
of the engine's thread, which sleeps while it waits for the device; "device", the sum of all kernels and copies, from
torch's profiler in a round of its own; "over_device", wall less device, which is what the host costs. "same_greedy" and
"same_sampled" are the shares of tokens that equal those of single steps, up to each request's first difference.
"""

from __future__ import annotations

import argparse
import json
import time

from omni_actors.engine.platform import prepare

prepare()

import command_line  # noqa: E402
import torch  # noqa: E402

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.autoregressive import AutoregressiveEngine  # noqa: E402
from omni_actors.engine.rows import to_host  # noqa: E402
from omni_actors.protocol.payloads import StageParams  # noqa: E402
from omni_actors.stage.engine_interface import ErrorEvent, StageInputs, StageRequest, StreamEvent  # noqa: E402

PROMPT, TEXT = 200, 20
WARM = 24  # tokens of each request before the clock starts: the prompt and those for which there is text


class Round:
    """Requests that run side by side, all of the same length, until each has its tokens."""

    def __init__(self, engine: AutoregressiveEngine, batch: int, tokens: int, temperature: float | None = None) -> None:
        self.engine = engine
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.total = tokens
        for index in range(batch):
            generator = torch.Generator().manual_seed(index)
            rows = torch.randn(PROMPT + TEXT, engine.adapter.row_width, generator=generator)
            rows = rows.to(engine.adapter.model_dtype)
            params = StageParams(max_tokens=tokens, min_tokens=tokens, temperature=temperature)
            tensors = {"prompt_rows": to_host(rows[:PROMPT]), "reply_rows": to_host(rows[PROMPT:])}
            engine.start(StageRequest(str(index), params, seed=index), StageInputs(tensors=tensors))

    def run(self, until: int) -> None:
        """Step until every request has sent `until` tokens, or ended."""
        while self.engine.runnable() and min(map(len, self.tokens)) < until:
            for event in self.engine.step():
                if isinstance(event, ErrorEvent):
                    raise event.error
                if isinstance(event, StreamEvent):
                    self.tokens[int(event.request_id)] += event.token_ids

    def timed(self, warm: int = 0) -> tuple[float, float]:
        """Run to the end; wall and host milliseconds per step, without the first `warm` ones."""
        self.run(warm)
        steps = self.total - len(self.tokens[0])
        began, cpu = time.perf_counter(), time.thread_time()
        self.run(self.total)
        wall, host = time.perf_counter() - began, time.thread_time() - cpu
        while self.engine.runnable():  # so that it frees what has ended
            self.engine.step()
        return round(1000 * wall / steps, 3), round(1000 * host / steps, 3)


def device_ms(engine: AutoregressiveEngine, batch: int, tokens: int) -> float:
    """Milliseconds of the device per step."""
    work = Round(engine, batch, tokens)
    work.run(WARM)
    had = len(work.tokens[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work.timed()
        torch.cuda.synchronize()
    busy = sum(event.self_device_time_total for event in profile.key_averages())
    return round(busy / 1000 / (tokens - had), 3)


def same(given: list[list[int]], expected: list[list[int]]) -> float:
    equal = 0
    for have, want in zip(given, expected, strict=True):
        differing = [place for place, pair in enumerate(zip(have, want, strict=True)) if pair[0] != pair[1]]
        equal += differing[0] if differing else len(want)
    return round(equal / sum(map(len, expected)), 4)


def main(options: argparse.Namespace) -> None:
    fields = command_line.fields(options)
    defaults = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
    config = OmniModelConfig(options.checkpoint, "talker")
    engine = AutoregressiveEngine(OmniEngineArgs(config, "autoregressive", {**defaults, **fields}))
    scheduler = engine.core.scheduler
    for batch in options.batch:
        single: dict[str, list[list[int]]] = {}
        for steps in options.steps:
            scheduler.steps_per_schedule = steps
            line: dict[str, float] = {"batch": batch, "steps": steps}
            for name, temperature in (("greedy", 0.0), ("sampled", None)):  # which also warms up
                work = Round(engine, batch, options.checked, temperature)
                work.timed()
                line[f"same_{name}"] = same(work.tokens, single.setdefault(name, work.tokens))
            line["wall"], line["host"] = Round(engine, batch, options.tokens).timed(WARM)
            if torch.cuda.is_available():
                line["device"] = device_ms(engine, batch, options.tokens // 2)
                line["over_device"] = round(line["wall"] - line["device"], 3)
            print(json.dumps(line), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8], help="the first one is compared with")
    parser.add_argument("--tokens", type=int, default=384, help="of each request that is timed")
    parser.add_argument("--checked", type=int, default=128, help="tokens of each request that is compared")
    command_line.add_fields(parser)
    main(parser.parse_args())
