"""Simulates how the sound of many answers reaches their listeners: which order, and which chunks, leave no gaps.

    python benchmarks/playback_simulation.py [--concurrency N ...] [--policy 1,1,2,4,8 ...] [--order ORDER ...]

A discrete-event model of thinker, talker and vocoder on one GPU, with step times that were measured on an H200
(docs/benchmarks.md) and a simple rule of how much the stages slow one another down. The
vocoder's order is decided by the function that its scheduler calls, and who yields to whom by `DevicePriority`. It
takes seconds and no GPU. It tells orders and policies apart; absolute figures are for `benchmarks/serve.py` to measure.

Orders: `number` ranks chunks by their number and finishes what it has begun, as 0.2 did; `deadline` is today's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import simulated_stages
import workload
from simulated_stages import ORDERS, POLICY, YIELDS, Setting


def simulate(setting: Setting) -> dict[str, Any]:
    """One load; the row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = simulated_stages.Pipeline(setting, Path(folder))
        samples, wall = pipeline.run()
    row = workload.summary(f"c={setting.concurrency}", samples, wall)
    return {
        "policy": ",".join(map(str, setting.policy)),
        "order": setting.order,
        **{
            name: row[name]
            for name in (
                "load",
                "ttft_ms",
                "ttfa_ms",
                "smooth_start_ms",
                "stalled",
                "longest_gap_s",
                "e2e_s",
                "req_per_s",
            )
        },
        **pipeline.busy(),
    }


def lengths(text: str) -> tuple[int, ...]:
    """Chunk lengths from the command line."""
    blocks = tuple(int(part) for part in text.split(","))
    if not all(length >= 1 for length in blocks):
        raise argparse.ArgumentTypeError(f"chunks have at least one block; got {text!r}")
    return blocks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=2, help="answers = rounds * concurrency, after a warm-up")
    parser.add_argument("--policy", type=lengths, nargs="*", default=[POLICY], help="blocks; the last repeats")
    parser.add_argument("--order", choices=ORDERS, nargs="*", default=["number", "deadline"])
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds over which the first requests come")
    parser.add_argument("--talker-yields-to", nargs="*", default=Setting.talker_yields_to, choices=YIELDS)
    parser.add_argument("--send-at-once", action="store_true", help="keep no first sound until the rest can follow")
    parser.add_argument("--pace", type=float, default=Setting.pace, help="coordinator.speech_pace; 0: no speech waits")
    parser.add_argument("--cold", action="store_true", help="no warm-up")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests a second at random moments, in no closed loop"
    )
    parser.add_argument("--points", type=int, default=Setting.points, help="of the vocoder's solver: num_steps")
    parser.add_argument("--slowness", type=float, default=1.0, help="of the device: 1.5 needs half as much time again")
    parser.add_argument("--lengths", type=int, nargs="+", default=Setting.lengths, help="codec tokens, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the spread of step times")
    parser.add_argument("--json", action="store_true", help="a line for each load instead of a table")
    options = parser.parse_args(arguments)
    rows = [
        simulate(
            Setting(
                concurrency=concurrency,
                rounds=options.rounds,
                policy=policy,
                order=order,
                stagger=options.stagger,
                talker_yields_to=tuple(options.talker_yields_to),
                seed=options.seed,
                keeps=not options.send_at_once,
                pace=options.pace,
                cold=options.cold,
                rate=options.rate,
                slowness=options.slowness,
                points=options.points,
                lengths=tuple(options.lengths),
            )
        )
        for policy in options.policy
        for order in options.order
        for concurrency in options.concurrency
    ]
    print("\n".join(json.dumps(row) for row in rows) if options.json else workload.table(rows))


if __name__ == "__main__":
    main()
