"""Measures how well the speaking checkpoint can be understood with each way of decoding sound.

    python benchmarks/quality.py                                 # on a GPU: adds TF32 and bf16 in the GPU's own kernels
    python benchmarks/quality.py --recogniser                    # with word errors; pip install -e '.[quality]'
    python benchmarks/quality.py --sentences 4 --only whole float32 bf16

The vocoder stage decodes the true codes of held-out sentences, the two voices in turn, so that nothing depends on the
talker's mistakes. Each row is one change to the defaults. Columns, the first three against the first row: the whole
decode in float32 of the same tokens and noise.

* mel: mean distance of natural-log mels. LSD: log-spectral distance in dB.
* edge: largest step between two samples where chunks meet, divided by the 99.9 % quantile of all steps of the whole
  decode; above 1 is a click.
* frames: part of the frames of 10 ms that do not sound like the phone of their code, by a linear judge
  (tools/speaker/judge.py). It tells speech from noise; a few hundredths say nothing.
* words: word error rate by Whisper tiny.en.

Prints a table; --json writes the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from omni_actors.engine.platform import prepare

prepare()

import torch  # noqa: E402
import workload  # noqa: E402

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.diffusion import DiffusionEngine  # noqa: E402
from omni_actors.protocol.payloads import StageParams  # noqa: E402
from omni_actors.stage.engine_interface import AudioEvent, ErrorEvent, StageInputs, StageRequest  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tools.speaker.judge import Judge, held_out_speech  # noqa: E402
from tools.speaker.recogniser import load_recogniser, word_errors  # noqa: E402
from tools.speaker.sound import log_mel  # noqa: E402

CHECKPOINT = REPOSITORY / "examples" / "speaker"
POINTS = 10  # in time, of the solver


@dataclass(frozen=True)
class Way:
    """A way of decoding: a row of the table."""

    name: str
    decode: dict[str, Any] = field(default_factory=dict)
    points: int = POINTS
    batch: int = 1
    engine: dict[str, Any] = field(default_factory=dict)


WHOLE = {"policy": "whole", "precision": "float32"}
CHEAPER = [("midpoint", 10), ("midpoint", 6), ("euler", 20), ("euler", 10)]
WAYS = [
    Way("whole", WHOLE),
    Way("defaults"),
    Way("again", {}),  # in a new engine, as after a replay
    Way("float32", {"precision": "float32"}),
    Way("tf32", {"precision": "tf32"}),
    Way("bf16", {"precision": "bf16"}),
    Way("look-ahead 0", {"look_ahead_blocks": 0}),
    Way("look-ahead 2", {"look_ahead_blocks": 2}),
    *(Way(f"chunks of {n}", {"first_blocks": n, "largest_blocks": n, "look_ahead_blocks": 1}) for n in (1, 4)),
    *(Way(f"{points} points", WHOLE, points=points) for points in (4, 6, 20)),
    *(Way(f"{solver}, {points} points", WHOLE | {"solver": solver}, points=points) for solver, points in CHEAPER),
    Way("16 at once", {}, batch=16),
    Way("eager", {}, engine={"enforce_eager": True}),
]
GPU_ONLY = {"tf32", "eager"}


@dataclass(frozen=True)
class Line:
    """A sentence to be decoded."""

    text: str
    voice: str
    codes: list[int]


def decode(way: Way, lines: list[Line], checkpoint: str) -> list[list[np.ndarray]]:
    """Chunks of each line's sound; line n has noise n. A batch above the number of lines repeats them."""
    config = OmniModelConfig(checkpoint, "code2wav", decode=way.decode)
    engine = DiffusionEngine(OmniEngineArgs(config, "diffusion", engine={"max_num_seqs": 16, **way.engine}))
    heard: dict[str, list[np.ndarray]] = {}
    try:
        for begin in range(0, max(len(lines), way.batch), way.batch):
            for index in range(begin, begin + way.batch):
                number = index % len(lines)
                line, name = lines[number], f"{index}"
                request = StageRequest(name, StageParams(num_steps=way.points), number, line.voice)
                heard[name] = []
                engine.start(request, StageInputs(token_ids=line.codes))
            while engine.runnable():
                for event in engine.step():
                    if isinstance(event, AudioEvent):
                        heard[event.request_id].append(np.frombuffer(event.samples.data, np.float32))
                    elif isinstance(event, ErrorEvent):
                        raise event.error
    finally:
        engine.shutdown()
    return [heard[str(index)] for index in range(len(lines))]


def log_spectral_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Root mean square difference of the log spectra in decibel, bins more than 80 dB below the peak left out."""

    def spectrum(wave: np.ndarray) -> torch.Tensor:
        window = torch.hann_window(1024)
        return torch.stft(torch.from_numpy(wave.copy()), 1024, 256, window=window, return_complex=True).abs()

    first, second = spectrum(one), spectrum(other)
    floor = second.max() * 1e-4
    return float((20 * torch.log10(first.clamp(min=floor) / second.clamp(min=floor))).square().mean(0).sqrt().mean())


def mel_distance(one: np.ndarray, other: np.ndarray) -> float:
    first, second = (log_mel(torch.from_numpy(np.ascontiguousarray(wave))[None]) for wave in (one, other))
    return float((first - second).abs().mean())


def edge_step(parts: list[np.ndarray], whole: np.ndarray) -> float:
    wave, edges = np.concatenate(parts), np.cumsum([len(part) for part in parts])[:-1]
    if not len(edges):
        return 0.0
    return float(np.abs(wave[edges] - wave[edges - 1]).max() / np.quantile(np.abs(np.diff(whole)), 0.999))


def measure(lines: list[Line], sounds: list[list[np.ndarray]], wholes: list[np.ndarray], hear: Any) -> dict[str, Any]:
    """The columns of one row."""
    judge, waves = Judge.load(), [np.concatenate(parts) for parts in sounds]
    row = {
        "mel": np.mean([mel_distance(wave, whole) for wave, whole in zip(waves, wholes, strict=True)]),
        "lsd_db": np.mean([log_spectral_distance(wave, whole) for wave, whole in zip(waves, wholes, strict=True)]),
        "edge": max(edge_step(parts, whole) for parts, whole in zip(sounds, wholes, strict=True)),
        "frames": np.mean([judge.wrong_frames(wave, line.codes) for wave, line in zip(waves, lines, strict=True)]),
    }
    if hear is not None:
        counts = [word_errors(line.text, hear(wave)) for wave, line in zip(waves, lines, strict=True)]
        row["words"] = sum(wrong for wrong, _ in counts) / sum(total for _, total in counts)
    return {name: round(float(value), 3) for name, value in row.items()}


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    lines = [Line(*speech) for speech in held_out_speech()[: options.sentences]]
    ways = [way for way in WAYS if torch.cuda.is_available() or way.name not in GPU_ONLY]
    if options.only:
        ways = [way for way in ways if way.name in {*options.only, "whole"}]
    hear = load_recogniser() if options.recogniser else None
    wholes: list[np.ndarray] = []
    rows = []
    for way in ways:
        sounds = decode(way, lines, options.checkpoint)
        wholes = wholes or [np.concatenate(parts) for parts in sounds]
        rows.append({"way": way.name, **measure(lines, sounds, wholes, hear)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps({"sentences": len(lines), "rows": rows}, indent=1) + "\n")
    print(workload.table(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(CHECKPOINT))
    parser.add_argument("--sentences", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=[way.name for way in WAYS], metavar="WAY")
    parser.add_argument("--recogniser", action="store_true", help="count word errors, too")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--json", type=Path)
    main(parser.parse_args())
