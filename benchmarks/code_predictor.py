"""The code predictor of Qwen's speech models alone: milliseconds a frame, at published sizes, with random weights.

Compares, for each batch size: the project's few kernels launched by Python (eager) and as one CUDA graph for all passes
of a frame (graph), torch's many (torch, and torch in a graph), and a predictor without cached keys that reads all codes
so far again in every pass (re-prefill), in a graph, too. `same` is the share of codes that are the same as torch's:
with random weights many codes are nearly equally likely, and the products are rounded differently. On a GPU:

    python benchmarks/code_predictor.py --json predictor.json
    python benchmarks/code_predictor.py --logits

`--logits` compares what both compute instead: logits of the same past, with those of torch in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from omni_actors.engine.models.code_predictor import CodePredictor, GraphedPredictor, PredictorConfig, batch_sizes
from omni_actors.engine.models.fused_predictor import FrameKernels

SIZES: dict[str, dict[str, Any]] = {
    "qwen3-omni": {"input_size": 1024, "vocab_size": 2048},
    "qwen3-tts-1.7b": {"input_size": 2048, "vocab_size": 2048, "temperature": 0.9, "top_p": 1.0},
    "tiny": {"input_size": 64, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "layers": 2,
             "heads": 4, "kv_heads": 2, "head_dim": 32},
}  # fmt: skip
PUBLISHED = {
    "groups": 16,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "layers": 5,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
}


def make_predictor(size: str, device: torch.device, dtype: torch.dtype) -> CodePredictor:
    """A predictor with random weights, the same in every run."""
    torch.manual_seed(0)
    predictor = CodePredictor(PredictorConfig(**{**PUBLISHED, **SIZES[size]}))
    with torch.no_grad():
        for parameter in predictor.parameters():
            if parameter.dim() > 1 and not bool((parameter == 1).all()):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    predictor.to(device)
    for parameter in predictor.parameters():  # the tables of rotations stay float32
        parameter.data = parameter.data.to(dtype)
    return predictor.eval()


def make_inputs(predictor: Any, batch: int, device: torch.device, dtype: torch.dtype, greedy: bool) -> tuple[Any, ...]:
    """One frame of each of `batch` requests."""
    generator = torch.Generator().manual_seed(batch)
    states = torch.randn(2, batch, predictor.config.input_size, generator=generator).to(device, dtype)
    seeds = torch.arange(batch, device=device)
    return states[0], states[1], seeds, seeds * 3, torch.full((batch,), greedy, device=device)


def without_cache(predictor: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `CodePredictor.forward` computes, with all positions read again in every pass."""
    hidden, first, seeds, frames, greedy = inputs
    config = predictor.config
    noise = predictor.noise(seeds, frames)
    read = torch.stack((hidden, first), dim=1)
    total, codes = first.float(), []
    for group in range(config.groups - 1):
        x = predictor.projection(read) if predictor.projection is not None else read
        n = x.shape[1]
        cache = hidden.new_empty(2, len(hidden), config.kv_heads, n, config.head_dim)
        for layer in predictor.layers:
            x = layer(x, predictor.cos[:n], predictor.sin[:n], cache, 0)
        x = F.rms_norm(x[:, -1], x.shape[-1:], predictor.norm, config.eps)
        code = predictor.sample(F.linear(x, predictor.heads[group]).float(), noise[:, group], greedy)
        codes.append(code)
        embedded = predictor.embeddings[group][code].unsqueeze(1)
        total = total + embedded[:, 0]
        read = torch.cat((read, embedded), dim=1)
    return torch.stack(codes, dim=1), total.to(first.dtype)


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> dict[str, float]:
    """Median and p95 of a call, measured on the device where it is one."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            call()
            taken.append((time.perf_counter() - started) * 1e3)
    taken.sort()
    return {"median_ms": statistics.median(taken), "p95_ms": taken[int(0.95 * (len(taken) - 1))]}


def graphed(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """A function that replays `function(*inputs)` as one CUDA graph and returns its results."""
    function(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(*inputs)

    def replay() -> Any:
        graph.replay()
        return results

    return replay


@torch.inference_mode()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, with the share of codes that are the same as torch's."""
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    predictor = make_predictor(options.size, device, dtype)
    plain = make_predictor(options.size, device, dtype)
    plain.fused = False
    bucketed = GraphedPredictor(predictor, max(options.batches), dtype, device)
    if device.type == "cuda":
        bucketed.capture(batch_sizes(max(options.batches)))
    figures: list[dict[str, Any]] = []
    for batch in options.batches:
        inputs = make_inputs(predictor, batch, device, dtype, options.greedy)
        eager = plain(*inputs)[0]
        ways: dict[str, Callable[[], Any]] = {
            "eager": lambda inputs=inputs: predictor(*inputs),
            "graph": lambda inputs=inputs: bucketed(*inputs),
        }
        others = {"torch": plain, "re-prefill": lambda *given: without_cache(plain, *given)}
        for name, function in others.items():
            if device.type == "cuda":
                ways[f"{name}, graph"] = graphed(function, inputs)
            else:
                ways[name] = lambda inputs=inputs, function=function: function(*inputs)
        if device.type == "cuda":
            ways["torch"] = lambda inputs=inputs: plain(*inputs)
        for way, call in ways.items():
            same = float((call()[0] == eager).float().mean())
            times = milliseconds(call, device, options.repeats)
            figures.append({"batch": batch, "way": way, **times, "same_codes": same})
            print(f"{batch:4d}  {way:17s}  {times['median_ms']:8.3f} ms  p95 {times['p95_ms']:8.3f}  same {same:.4f}")
    memory = torch.cuda.max_memory_reserved() if device.type == "cuda" else 0
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    return {"size": options.size, "device": name, "torch": torch.__version__, "bytes": memory, "figures": figures}


def torch_logits(
    predictor: CodePredictor, inputs: tuple[torch.Tensor, ...], codes: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits f32 [B, G - 1, vocabulary] of torch after these codes, by default the likeliest ones."""
    kept: list[torch.Tensor] = []

    def sample(logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        kept.append(logits)
        return logits.argmax(dim=-1) if codes is None else codes[:, len(kept) - 1]

    predictor.fused, predictor.sample = False, sample  # type: ignore[method-assign]
    predictor(*inputs)
    return torch.stack(kept, dim=1)


def kernel_logits(predictor: CodePredictor, inputs: tuple[torch.Tensor, ...], codes: torch.Tensor) -> torch.Tensor:
    """The logits f32 [B, G - 1, vocabulary] of our kernels after these codes."""
    hidden, first = inputs[:2]
    frame, kept = FrameKernels(predictor, len(hidden)), []
    frame.enter(hidden.contiguous())
    frame.read(0)
    frame.enter(first.contiguous())
    for group in range(predictor.config.groups - 1):
        frame.read(group + 1)
        frame.product(frame.weighted, predictor.heads[group], frame.logits, normed=True)
        kept.append(frame.logits.clone())
        frame.enter(predictor.embeddings[group][codes[:, group]].contiguous())
    return torch.stack(kept, dim=1)


@torch.inference_mode()
def compare_logits(options: argparse.Namespace) -> list[dict[str, Any]]:
    """For each batch: how far torch's logits and those of our kernels are from torch's in float32, of the same past."""
    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    ours, exact = (make_predictor(options.size, device, kind) for kind in (dtype, torch.float32))
    with torch.no_grad():
        for parameter, rounded in zip(exact.parameters(), ours.parameters(), strict=True):
            parameter.copy_(rounded)
    rows = []
    for batch in options.batches:
        inputs = make_inputs(ours, batch, device, dtype, greedy=True)
        wide = tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs)
        wanted = torch_logits(exact, wide)
        codes = wanted.argmax(dim=-1)
        ways = {"our kernels": kernel_logits(ours, inputs, codes), "torch": torch_logits(ours, inputs, codes)}
        best = wanted.topk(2).values
        gaps = best[..., 0] - best[..., 1]
        for way, logits in ways.items():
            apart, other = (logits - wanted).abs(), logits.argmax(dim=-1) != codes
            largest_gap = float(gaps[other].max()) if bool(other.any()) else 0.0
            row = {
                "batch": batch,
                "way": way,
                "largest": float(apart.max()),
                "mean": float(apart.mean()),
                "deviation": float(wanted.std()),
                "equal_codes": 1.0 - float(other.float().mean()),
                "largest_gap": largest_gap,
            }
            rows.append(row)
            print(
                f"{batch:4d}  {way:11s}  from float32: at most {row['largest']:.4f}, mean {row['mean']:.5f}, logits' "
                f"deviation {row['deviation']:.2f}; equal codes {row['equal_codes']:.4f}, of others the gap is at most "
                f"{largest_gap:.4f}"
            )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="qwen3-omni")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--greedy", action="store_true", help="take the likeliest codes instead of drawing them")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--logits", action="store_true", help="compare logits instead of times")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    result: Any = compare_logits(options) if options.logits else measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
