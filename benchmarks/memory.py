"""Measures the memory of every stage of a pipeline, each alone in a process, by length of the input and concurrency.

    python benchmarks/memory.py stage_configs/qwen2_5_omni.yaml --model DIR --load-format dummy
    python benchmarks/memory.py stage_configs/tiny_qwen2_5_omni.yaml --prompt-tokens 64 --concurrency 2

Prints a JSON object per measurement to stderr while it runs, and one table at the end. `tokens` are those of a
request's input (of the prompt, or codec tokens), `requests` run at a time; 0 is the idle stage after its warm-up.
`embeddings` are the rows that the thinker sends and the talker takes, of all requests together; `held` is the most that
a diffusion stage's budget counted as held for them. Of a stage's share of
the GPU (`gpu_memory_utilization`) vLLM gives `kv_cache` what is left after the weights and `profile`: the activations
of its profile run, CUDA's context and graphs. `weights` of a diffusion stage are all that it has allocated when idle.
`allocated` and `reserved` are the peaks of torch's allocator during the load, `device_bytes` is what the stage itself
reports after it (omni_device_memory_bytes), `device` what all processes use on the GPU then, `rss` the highest resident
memory of the stage's process. On a CPU there are no figures of a device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import command_line
import psutil
import workload

from omni_actors import config

GIB, MIB = 1 << 30, 1 << 20
COLUMNS = ("stage", "tokens", "requests", "embeddings_mib", "held_mib", "weights_gib", "kv_cache_gib", "profile_gib")
COLUMNS += ("allocated_gib", "reserved_gib", "device_bytes_gib", "device_gib", "rss_gib")
MODEL_KINDS = (config.StageKind.AUTOREGRESSIVE, config.StageKind.DIFFUSION)


def gib(count: float) -> float:
    return round(count / GIB, 2)


def load_pipeline(options: argparse.Namespace) -> config.PipelineConfig:
    """The pipeline of the command line, with `--load-format` in every stage that has a model."""
    overrides = command_line.overrides(options)
    pipeline = config.load(options.config, overrides).pipeline
    if options.load_format:
        formats = {f"stages.{stage.name}.engine.load_format": options.load_format for stage in model_stages(pipeline)}
        pipeline = config.load(options.config, {**formats, **overrides}).pipeline
    return pipeline


def model_stages(pipeline: config.PipelineConfig, names: Sequence[str] = ()) -> list[config.StageConfig]:
    """The stages with a model; only those of these names, if any are given."""
    stages = [stage for stage in pipeline.stages if stage.kind in MODEL_KINDS]
    if unknown := set(names) - {stage.name for stage in stages}:
        raise SystemExit(f"{pipeline.name} has no stage with a model that is called {', '.join(sorted(unknown))}.")
    return [stage for stage in stages if stage.name in names or not names]


# ------------------------------------------------------------------------------------------- in the process of a stage


class Stage:
    """The engine of one stage in this process, with inputs for it."""

    def __init__(self, pipeline: config.PipelineConfig, stage: config.StageConfig, output_tokens: int) -> None:
        from omni_actors.engine.arguments import build_stage_engine
        from omni_actors.engine.models.qwen2_5_omni.talker import RowTalkerAdapter

        self.name = stage.name
        self.engine = build_stage_engine(pipeline, stage, lambda phase: print(phase, file=sys.stderr, flush=True))
        self.diffusion = stage.kind is config.StageKind.DIFFUSION
        self.takes_rows = not self.diffusion and isinstance(self.engine.adapter, RowTalkerAdapter)
        self._output_tokens = output_tokens

    def inputs(self, tokens: int) -> Any:
        """Input of one request, complete from the start, and bytes of the embeddings in it."""
        import torch

        from omni_actors.engine.rows import to_host
        from omni_actors.stage.engine_interface import StageInputs

        if not self.takes_rows:
            return StageInputs(token_ids=[1 + index % 200 for index in range(tokens)]), 0
        adapter = self.engine.adapter
        rows = torch.randn(tokens + 1 + self._output_tokens, adapter.row_width).to(adapter.model_dtype)
        tensors = {"prompt_rows": to_host(rows[: tokens + 1]), "reply_rows": to_host(rows[tokens + 1 :])}
        return StageInputs(tensors=tensors), rows.nbytes

    def run(self, tokens: int, requests: int) -> dict[str, Any]:
        """Run this many requests at a time to their end; the figures of the load."""
        from omni_actors.protocol.payloads import StageParams
        from omni_actors.stage.engine_interface import ErrorEvent, StageRequest, StreamEvent

        count = self._output_tokens
        params = StageParams() if self.diffusion else StageParams(max_tokens=count, min_tokens=count)
        embeddings = held = 0
        with Peak() as peak:
            for index in range(requests):
                inputs, size = self.inputs(tokens)
                embeddings += size
                self.engine.start(StageRequest(f"r{index}", params, seed=index), inputs)
                del inputs
                peak.sample()
            while self.engine.runnable():
                for event in self.engine.step():
                    if isinstance(event, ErrorEvent):
                        raise event.error
                    if isinstance(event, StreamEvent):
                        embeddings += len(event.tensors["rows"].data) if "rows" in event.tensors else 0
                peak.sample()
                if (budget := self.engine.statistics().budget) is not None:
                    held = max(held, budget.held_bytes)
        row = {"stage": self.name, "tokens": tokens, "requests": requests, **peak.figures(self.engine.device_bytes())}
        own = {"held_mib": held} if self.diffusion else {"embeddings_mib": embeddings}
        return {**row, **{name: round(count / MIB, 2) for name, count in own.items()}}

    def idle(self) -> dict[str, Any]:
        """What the stage holds after its start."""
        import torch

        with Peak() as peak:
            peak.sample()
        row = {"stage": self.name, "tokens": 0, "requests": 0, **peak.figures(self.engine.device_bytes())}
        core, worker = self.engine.core, self.engine.core.worker
        kv_cache = sum(tensor.size for tensor in core.scheduler.kv_cache_config.kv_cache_tensors)
        if not self.diffusion:
            row["kv_cache_gib"] = gib(kv_cache)
        if torch.cuda.is_available():
            weights = torch.cuda.memory_allocated() if self.diffusion else worker.model_runner.model_memory_usage
            row["weights_gib"] = gib(weights)
            if not self.diffusion:
                row["profile_gib"] = gib(worker.requested_memory - weights - kv_cache)
        return row


class Peak:
    """Highest memory of this process within a block: host by samples, device by torch's own count."""

    def __enter__(self) -> Peak:
        import torch

        gc.collect()
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._process = psutil.Process()
        self._rss = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.sample()

    def sample(self) -> None:
        self._rss = max(self._rss, self._process.memory_info().rss)

    def figures(self, device_bytes: int) -> dict[str, float]:
        import torch

        figures = {"rss_gib": gib(self._rss)}
        if self._cuda:
            free, total = torch.cuda.mem_get_info()
            figures["allocated_gib"] = gib(torch.cuda.max_memory_allocated())
            figures["reserved_gib"] = gib(torch.cuda.max_memory_reserved())
            figures["device_bytes_gib"] = gib(device_bytes)
            figures["device_gib"] = gib(total - free)
        return figures


def measure(options: argparse.Namespace) -> None:
    """Print the measurements of the stage `--only` as lines of JSON."""
    from omni_actors.engine.platform import prepare

    prepare()
    pipeline = load_pipeline(options)
    stage = Stage(pipeline, pipeline.stage(options.only), options.output_tokens)

    def report(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)

    report(stage.idle())
    lengths = options.codec_tokens if stage.diffusion else options.prompt_tokens
    stage.run(min(lengths), 1)  # whatever the first request still has to set up
    for tokens in lengths:
        for requests in options.concurrency:
            report(stage.run(tokens, requests))
    stage.engine.shutdown()


# --------------------------------------------------------------------------------------- in the process of the command


def rows_of(stage: config.StageConfig, seconds: float, failed: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run this file for one stage; yield its measurements, also those before a failure."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", stage.name]
    environment = {**os.environ, **{name: str(value) for name, value in stage.environment.items()}}
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=seconds, check=False)
        output, end = done.stdout, f"ended with exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        partial = error.stdout or b""  # bytes even where text was asked for
        output = partial.decode() if isinstance(partial, bytes) else partial
        end = f"took more than {seconds:g} s"
    if end:
        failed(f"{stage.name} {end}; its messages are above.")
    for line in output.splitlines():
        if line.startswith("{"):
            print(line, file=sys.stderr, flush=True)
            yield json.loads(line)


def main(options: argparse.Namespace) -> None:
    failures: list[str] = []
    stages = model_stages(load_pipeline(options), options.stages)
    rows = [row for stage in stages for row in rows_of(stage, options.stage_timeout, failures.append)]
    if rows:
        shown = [name for name in COLUMNS if any(name in row for row in rows)]
        print(workload.versions_line())
        print(workload.table([{name: row.get(name, "-") for name in shown} for row in rows]))
    if options.json:
        options.json.write_text(workload.report(rows))
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    command_line.add_flags(parser)
    parser.add_argument("--load-format", help="vLLM's load_format of every stage; 'dummy' for random weights")
    parser.add_argument("--stages", nargs="+", default=[], metavar="STAGE", help="measure only these")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--codec-tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--output-tokens", type=int, default=32, help="of thinker and talker, for each request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--stage-timeout", type=float, default=300.0, help="seconds for each stage, start included")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", metavar="STAGE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    (measure if arguments.only else main)(arguments)
