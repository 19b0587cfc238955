"""Shows whether CUDA graphs and compilation change tokens or hidden rows of the thinker's or talker's engine.

    python benchmarks/rows_equal_eager.py checkpoints/tiny_qwen2_5_omni --requests 12
    python benchmarks/rows_equal_eager.py DIR --set load_format=dummy --set dtype=bfloat16

Every variant gets the same requests, greedily; one joins every third step while others run and leave. Prints for each
variant, against eager: requests with equal tokens, the position of the first difference in the others, and the largest
difference of a row (the thinker's hidden states) up to there, as a share of the largest value. "eager again" shows how
much a second eager run differs.
"""

from __future__ import annotations

import argparse

from omni_actors.engine.platform import prepare

prepare()

import command_line  # noqa: E402
import torch  # noqa: E402

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.autoregressive import AutoregressiveEngine  # noqa: E402
from omni_actors.engine.tensors import to_host, to_torch  # noqa: E402
from omni_actors.protocol.payloads import StageParams  # noqa: E402
from omni_actors.stage.engine_interface import (  # noqa: E402
    ErrorEvent,
    FinishedEvent,
    StageInputs,
    StageRequest,
    StreamEvent,
    TextEvent,
)

STEPS_BETWEEN = 3
VARIANTS = {
    "eager": {"enforce_eager": True},
    "eager again": {"enforce_eager": True},
    "compile + piecewise graphs": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "compile + full and piecewise graphs (vLLM's default)": {},
    "full graphs for decode, no compile": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}
Answer = tuple[list[int], torch.Tensor]  # tokens; rows f32 [tokens, width], none for the talker


def inputs_of(engine: AutoregressiveEngine, stage: str, index: int) -> StageInputs:
    generator = torch.Generator().manual_seed(index)
    length = 20 + 37 * (index % 5)
    if stage == "thinker":
        return StageInputs(token_ids=torch.randint(3, 200, (length,), generator=generator).tolist())
    rows = torch.randn(length + 64, engine.adapter.row_width, generator=generator).to(engine.adapter.row_dtype)
    return StageInputs(tensors={"prompt_rows": to_host(rows[:length]), "reply_rows": to_host(rows[length:])})


def run(options: argparse.Namespace, stage: str, variant: dict[str, object]) -> list[Answer]:
    """Tokens and rows of each request."""
    fields = command_line.fields(options)
    config = OmniModelConfig(options.checkpoint, stage)
    usual = {"max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
    engine = AutoregressiveEngine(OmniEngineArgs(config, "autoregressive", {**usual, **fields, **variant}))
    tokens: list[list[int]] = [[] for _ in range(options.requests)]
    rows: list[list[torch.Tensor]] = [[] for _ in range(options.requests)]
    started = done = steps = 0
    while done < options.requests:
        if started < options.requests and steps >= STEPS_BETWEEN * started:
            count = options.tokens - 7 * (started % 4)
            params = StageParams(max_tokens=count, min_tokens=count, temperature=0.0)
            engine.start(StageRequest(str(started), params, seed=0), inputs_of(engine, stage, started))
            started += 1
        steps += 1
        for event in engine.step():
            index = int(event.request_id)
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, FinishedEvent):
                done += 1
            elif isinstance(event, TextEvent) or (isinstance(event, StreamEvent) and stage == "talker"):
                tokens[index] += event.token_ids
            elif isinstance(event, StreamEvent):
                rows[index] += [to_torch(tensor).float().flatten(1) for tensor in event.tensors.values()]
    engine.shutdown()
    return [(ids, torch.cat(parts) if parts else torch.empty(0, 1)) for ids, parts in zip(tokens, rows, strict=True)]


def compare(name: str, answers: list[Answer], reference: list[Answer]) -> str:
    same, largest, parts = 0, 0.0, []
    for (ids, rows), (expected, expected_rows) in zip(answers, reference, strict=True):
        same += ids == expected
        parted = next((i for i, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1]), len(ids))
        if ids != expected:
            parts.append(parted)
        # The prompt's rows come first; each reply row belongs to the token before it.
        common = len(expected_rows) - len(expected) + parted
        if expected_rows.numel():
            apart = (rows[:common] - expected_rows[:common]).abs().max() / expected_rows.abs().max()
            largest = max(largest, float(apart))
    has_rows = any(rows.numel() for _, rows in reference)
    return f"{name} | {same}/{len(answers)} | {parts or '-'} | {f'{largest:.1e}' if has_rows else '-'} |"


def main(options: argparse.Namespace) -> None:
    columns = ("stage", "variant", "equal tokens", "first different token", "largest difference of a row")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for stage in options.stages:
        reference = None
        for name, variant in VARIANTS.items():
            answers = run(options, stage, variant)
            reference = reference or answers
            print(f"| {stage} | {compare(name, answers, reference)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--stages", nargs="+", default=["thinker", "talker"])
    command_line.add_fields(parser)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    main(parser.parse_args())
