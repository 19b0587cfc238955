"""Shows whether different tokens of compiled and eager runs of a stage come from rounding or from an error.

    python benchmarks/first_difference.py checkpoints/tiny_qwen2_5_omni --stages talker --dtype float32
    python -m tools.checkpoints full-qwen3 DIR && python benchmarks/first_difference.py DIR --layers 8 --random

Runs the same requests eagerly and with vLLM's default (compilation and graphs), one at a time and together, greedily.
Until the first different token two runs have the same past, so their logits may differ by rounding only, and so may
those of requests that ran together. Prints for each way, compared with one at a time and eagerly: how many tokens with
the same past are equal (of a talker of frames the first codes; then whole frames, and the code that differs first), how
many whole answers, by how much the logits of the same past differ at most, and, where tokens part, the largest gap
between the two best ones. A gap below the usual difference is rounding; a larger one is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omni_actors.engine.platform import prepare

os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # the tables stand alone
PLATFORM = prepare()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: E402

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.autoregressive import AutoregressiveEngine  # noqa: E402
from omni_actors.engine.tensors import to_host, to_torch  # noqa: E402
from omni_actors.protocol.payloads import StageParams  # noqa: E402
from omni_actors.stage.engine_interface import StageInputs, StageRequest, StreamEvent, TextEvent  # noqa: E402
from omni_actors.vllm_version import Platform  # noqa: E402

PROMPT, REPLY = 24, 64  # tokens
ENDINGS = ("o_proj", "down_proj", "w2_weight", "o.weight", "down.weight")  # of what is added to the rows between layers
TABLES = ("embed_tokens", "codec_embedding", "code_predictor.embeddings", "text_table")


@dataclass
class Answer:
    """One request: tokens, or frames of codes, and the logits [vocabulary] of every step."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@contextmanager
def shortened(folder: Path, layers: int | None) -> Iterator[Path]:
    """A copy of a checkpoint without weights whose thinker and talker have so many layers."""
    if layers is None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        for stage in ("thinker_config", "talker_config"):
            part = config[stage]
            (part.get("text_config") or part)["num_hidden_layers"] = layers
            if "accept_hidden_layer" in part:
                part["accept_hidden_layer"] = layers - 1
        (Path(copy) / "config.json").write_text(json.dumps(config))
        yield Path(copy)


@torch.no_grad()
def randomise(_loader: DummyModelLoader, model: nn.Module, model_config: Any) -> None:
    """Random weights with which logits have a spread, the same in every process; vLLM's own are nearly zero.

    What is added to the rows between layers is small enough for all layers to count.
    """
    layers = model_config.hf_text_config.num_hidden_layers
    tensors = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith(TABLES)}}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
        elif not bool((tensor == 1).all()):  # weights of norms
            generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
            deviation = 1.0 if any(table in name for table in TABLES) else tensor.shape[-1] ** -0.5
            if any(ending in name for ending in ENDINGS):
                deviation *= (2 * layers) ** -0.5
            tensor.normal_(std=deviation, generator=generator)


def inputs_of(engine: AutoregressiveEngine, index: int) -> StageInputs:
    """The inputs of the engine's warm-up, with random tokens and rows in the place of zeros."""
    generator = torch.Generator().manual_seed(index)
    inputs = engine.adapter.warm_up_inputs(PROMPT)
    rows = {name: to_torch(tensor, name) for name, tensor in inputs.tensors.items()}
    if "reply_rows" in rows:
        rows["reply_rows"] = rows["reply_rows"].new_zeros(REPLY, rows["reply_rows"].shape[1])
    drawn = {name: to_host(torch.randn(row.shape, generator=generator).to(row.dtype)) for name, row in rows.items()}
    ids = [*inputs.token_ids, *([0] * REPLY if "prompt_tokens" in inputs.scalars else [])]
    random = torch.randint(1, 300, (len(ids),), generator=generator).tolist()
    return replace(inputs, token_ids=[token or new for token, new in zip(ids, random, strict=True)], tensors=drawn)


class Recorder:
    """Keeps the logits of every step of an engine's requests."""

    def __init__(self, engine: AutoregressiveEngine) -> None:
        self.logits: dict[str, list[torch.Tensor]] = defaultdict(list)
        runner = engine.core.worker.model_runner
        sample, compute = runner.sample, runner.model.compute_logits
        names: list[str] = []

        def sampled(hidden: torch.Tensor, batch: Any, *rest: Any) -> Any:
            names[:] = batch.req_ids
            return sample(hidden, batch, *rest)

        def computed(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            for name, row in zip(names, logits, strict=False):
                self.logits[name].append(row.to("cpu", torch.float32, copy=True))
            return logits

        runner.sample, runner.model.compute_logits = sampled, computed


def answers(
    engine: AutoregressiveEngine, recorder: Recorder, options: argparse.Namespace, together: bool
) -> list[Answer]:
    """All requests, each alone, or up to `max_num_seqs` together, of which one joins in every other step."""
    params = StageParams(max_tokens=options.tokens, min_tokens=options.tokens, temperature=0.0, repetition_penalty=1.0)
    recorder.logits.clear()
    found = {str(index): Answer() for index in range(options.requests)}
    texts: dict[str, list[int]] = defaultdict(list)
    codes: dict[str, list[int]] = defaultdict(list)
    waiting, steps = list(found), 0
    while waiting or engine.runnable():
        if waiting and (not engine.runnable() or (together and steps % 2 == 0)):
            name = waiting.pop(0)
            engine.start(StageRequest(name, params, seed=0), inputs_of(engine, int(name)))
        steps += 1
        for event in engine.step():
            if isinstance(event, TextEvent):
                texts[event.request_id] += event.token_ids
            elif isinstance(event, StreamEvent):  # of a thinker, what it sends to the talker
                codes[event.request_id] += event.token_ids
    config = engine.core.vllm_config.model_config.hf_config
    groups = config.predictor_config.num_code_groups if hasattr(config, "predictor_config") else 1
    for name, answer in found.items():
        made = texts.get(name) or codes[name]
        answer.tokens = list(zip(*(made[group::groups] for group in range(groups)), strict=True))
        answer.logits = recorder.logits[name]
    return list(found.values())


def compare(given: Sequence[Answer], wanted: Sequence[Answer]) -> dict[str, Any]:
    """What the table shows of a way."""
    same = frames = parted = whole = 0
    apart, spread, gaps = 0.0, [], []
    first_books: Counter[int] = Counter()
    for answer, reference in zip(given, wanted, strict=True):
        pairs = list(zip(answer.tokens, reference.tokens, strict=True))
        step = next((index for index, (own, other) in enumerate(pairs) if own != other), len(pairs))
        same += step
        frames += min(step + 1, len(pairs))
        for index in range(min(step + 1, len(pairs))):
            own, other = answer.logits[index], reference.logits[index]
            finite = torch.isfinite(other)
            apart = max(apart, float((own - other)[finite].abs().max()))
            spread.append(float(other[finite].std()))
        if step == len(pairs):
            whole += 1
            continue
        book = next(index for index, (own, other) in enumerate(zip(*pairs[step], strict=True)) if own != other)
        first_books[book] += 1
        if book == 0:
            parted += 1
            best = reference.logits[step].topk(2).values
            gaps.append(float(best[0] - best[1]))
    return {
        "first": f"{frames - parted} of {frames} ({(frames - parted) / frames:.4f})",
        "frames": f"{same} of {frames} ({same / frames:.4f})",
        "books": " ".join(f"{book}:{count}" for book, count in sorted(first_books.items())) or "-",
        "answers": f"{whole} of {len(given)}",
        "apart": f"{apart:.4f} ({sum(spread) / len(spread):.2f})",
        "gaps": f"{max(gaps):.4f}" if gaps else "-",
    }


def ways(folder: Path, stage: str, options: argparse.Namespace) -> Iterator[tuple[str, list[Answer]]]:
    """The answers of every way, the one with which the others are compared first."""
    for eager in (True, False) if PLATFORM is not Platform.CPU else (True,):  # which has no graphs
        fields: dict[str, Any] = {
            "dtype": options.dtype,
            "load_format": "dummy" if options.random else "auto",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": options.kv_cache_mib << 20,
            "enforce_eager": eager,
        }
        if stage == "thinker":
            fields["skip_mm_profiling"] = True
        engine = AutoregressiveEngine(OmniEngineArgs(OmniModelConfig(str(folder), stage), "autoregressive", fields))
        recorder = Recorder(engine)
        name = "eager" if eager else "graphs"
        yield f"{name}, one at a time", answers(engine, recorder, options, together=False)
        yield f"{name}, together", answers(engine, recorder, options, together=True)
        engine.shutdown()


def main(options: argparse.Namespace) -> None:
    columns = {
        "first": "equal tokens (first codes)",
        "frames": "equal frames",
        "books": "codes that differ first, and how often",
        "answers": "equal answers",
        "apart": "largest difference of logits (their deviation)",
        "gaps": "largest gap where tokens part",
    }
    if options.random:
        DummyModelLoader.load_weights = randomise
    with shortened(options.checkpoint, options.layers) as folder:
        for stage in options.stages:
            began = time.perf_counter()
            print(f"\n{stage}, {options.dtype}\n\n| way | {' | '.join(columns.values())} |")
            print("|---" * (len(columns) + 1) + "|")
            reference: list[Answer] = []
            for name, found in ways(folder, stage, options):
                reference = reference or found
                row = compare(found, reference)
                print(f"| {name} | {' | '.join(row[column] for column in columns)} |", flush=True)
            print(f"\n{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--stages", nargs="+", default=["thinker", "talker"])
    parser.add_argument("--layers", type=int, help="of thinker and talker, in place of the checkpoint's")
    parser.add_argument("--random", action="store_true", help="random weights; the checkpoint has none")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--kv-cache-mib", type=int, default=512)
    main(parser.parse_args())
