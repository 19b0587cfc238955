"""Shows whether different tokens of compiled and eager runs of the talker come from rounding or from an error.

    python benchmarks/first_difference.py checkpoints/tiny_qwen2_5_omni --requests 48

Runs the same requests, one at a time, greedily in float32, eagerly and with vLLM's default (compilation and graphs).
Until the first different token both runs have the same input, so their logits may differ by rounding only. Prints the
largest difference of the logits over all common steps, and for each request with different tokens the gap between the
two best logits of the eager run at that step. A gap below the usual difference is rounding; a larger one is an error.
"""

from __future__ import annotations

import argparse
import json

from omni_actors.engine.platform import prepare

prepare()

import torch  # noqa: E402

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.autoregressive import AutoregressiveEngine  # noqa: E402
from omni_actors.engine.tensors import to_host  # noqa: E402
from omni_actors.protocol.payloads import StageParams  # noqa: E402
from omni_actors.stage.engine_interface import StageInputs, StageRequest, StreamEvent  # noqa: E402


def run(options: argparse.Namespace, *, eager: bool) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and logits [tokens, vocabulary] of each request."""
    fields = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 64 << 20,
        "enforce_eager": eager,
    }
    engine = AutoregressiveEngine(
        OmniEngineArgs(OmniModelConfig(options.checkpoint, "talker"), "autoregressive", fields)
    )
    model = engine.core.worker.model_runner.model
    original, seen = model.compute_logits, []

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        seen.append(logits[0].float().cpu())
        return logits

    model.compute_logits = compute_logits
    results = []
    for index in range(options.requests):
        generator = torch.Generator().manual_seed(index)
        rows = torch.randn(24 + 30, engine.adapter.row_width, generator=generator)
        tensors = {"prompt_rows": to_host(rows[:21]), "reply_rows": to_host(rows[21:])}
        params = StageParams(max_tokens=options.tokens, temperature=0.0)
        seen.clear()
        engine.start(StageRequest("r", params, seed=0), StageInputs(tensors=tensors))
        tokens: list[int] = []
        while engine.runnable():
            tokens += [t for e in engine.step() if isinstance(e, StreamEvent) for t in e.token_ids]
        results.append((tokens, torch.stack(seen[: len(tokens)])))
    engine.shutdown()
    return results


def main(options: argparse.Namespace) -> None:
    eager, default = run(options, eager=True), run(options, eager=False)
    largest, gaps, parted = 0.0, [], []
    for (tokens, logits), (others, other_logits) in zip(eager, default, strict=True):
        common = min(len(tokens), len(others))
        step = next((i for i in range(common) if tokens[i] != others[i]), common)
        finite = torch.isfinite(logits[: step + 1])
        apart = (logits[: step + 1] - other_logits[: step + 1])[finite[: len(other_logits)]].abs().max()
        largest = max(largest, float(apart))
        best = logits.topk(2).values
        gaps += (best[:, 0] - best[:, 1]).tolist()
        if step < common:
            parted.append({"step": step, "gap": float(best[step, 0] - best[step, 1]), "difference_here": float(apart)})
    report = {"requests": len(eager), "largest_logit_difference": largest, "smallest_gap": min(gaps), "parted": parted}
    print(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    main(parser.parse_args())
