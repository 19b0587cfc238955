"""Measures the vocoder stage alone: speed, precision, and what decoding in chunks does to the waveform.

    python benchmarks/code2wav.py checkpoints/tiny_qwen2_5_omni --tokens 250
    python benchmarks/code2wav.py DIR --load-format dummy --tokens 512 --batch 1 8 32 --precision float32 tf32 bf16

Speed: `batch` utterances, with all their tokens there from the start; seconds of audio per second, and milliseconds
from the first chunk's tokens to its samples. Quality, against the whole decode of the same tokens, noise and precision:
relative error of the waveform, log-spectral distance in dB (frames of 1024 samples, every 256), and the largest step
between two samples at a chunk's edge, divided by the 99.9 % quantile of the steps of the whole decode (above 1 is a
click). Prints one JSON object per configuration.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import numpy as np

from omni_actors.engine.platform import prepare

prepare()

import torch  # noqa: E402

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig  # noqa: E402
from omni_actors.engine.diffusion import DiffusionEngine  # noqa: E402
from omni_actors.protocol.payloads import StageParams  # noqa: E402
from omni_actors.stage.engine_interface import AudioEvent, ErrorEvent, StageInputs, StageRequest  # noqa: E402


def make_engine(options: argparse.Namespace, decode: dict[str, Any]) -> DiffusionEngine:
    config = OmniModelConfig(options.checkpoint, "code2wav", decode={"smooth_start": False} | decode)
    engine = {"max_num_seqs": max(options.batch)}
    if options.load_format:
        engine["load_format"] = options.load_format
    return DiffusionEngine(OmniEngineArgs(config, "diffusion", engine=engine))


def tokens_of(engine: DiffusionEngine, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        0, engine.core.worker.model_runner.config.dit_config.num_embeds, (count,), generator=generator
    ).tolist()


def speak(engine: DiffusionEngine, batch: int, tokens: int, steps: int) -> tuple[list[list[np.ndarray]], float, float]:
    """Chunks of each utterance, seconds to the first samples, seconds in all."""
    chunks: dict[str, list[np.ndarray]] = {str(index): [] for index in range(batch)}
    began = time.perf_counter()
    for name in chunks:
        request = StageRequest(name, StageParams(num_steps=steps), seed=int(name))
        engine.start(request, StageInputs(token_ids=tokens_of(engine, tokens, int(name))))
    first = 0.0
    while engine.runnable():
        for event in engine.step():
            if isinstance(event, AudioEvent):
                first = first or time.perf_counter() - began
                chunks[event.request_id].append(np.frombuffer(event.samples.data, np.float32))
            elif isinstance(event, ErrorEvent):
                raise event.error
    return list(chunks.values()), first, time.perf_counter() - began


def log_spectral_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Root mean square difference of the log spectra in decibel, bins more than 80 dB below the peak left out."""

    def spectrum(wave: np.ndarray) -> torch.Tensor:
        window = torch.hann_window(1024)
        return torch.stft(torch.from_numpy(wave.copy()), 1024, 256, window=window, return_complex=True).abs()

    first, second = spectrum(one), spectrum(other)
    floor = second.max() * 1e-4
    return float((20 * torch.log10(first.clamp(min=floor) / second.clamp(min=floor))).square().mean(0).sqrt().mean())


def quality(chunks: list[np.ndarray], whole: np.ndarray) -> dict[str, float]:
    wave = np.concatenate(chunks)
    edges = np.cumsum([len(chunk) for chunk in chunks])[:-1]
    steps = np.abs(np.diff(whole))
    report = {
        "chunks": len(chunks),
        "error": float(np.abs(wave - whole).max() / np.abs(whole).max()),
        "rms_error": float(np.sqrt(np.mean((wave - whole) ** 2) / np.mean(whole**2))),
        "lsd_db": log_spectral_distance(wave, whole),
    }
    if len(edges):
        report["edge_step"] = float(np.abs(wave[edges] - wave[edges - 1]).max() / np.quantile(steps, 0.999))
    return {name: round(value, 6) for name, value in report.items()}


def host_waits(engine: DiffusionEngine, options: argparse.Namespace) -> int:
    """How often the host waits for the device where it need not, while four requests run (torch's own operators)."""
    waits = 0

    def count(message: object, *_: object, **__: object) -> None:
        nonlocal waits
        waits += "synchronizing CUDA operation" in str(message)

    speak(engine, 4, options.tokens, options.steps)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        speak(engine, 4, options.tokens, options.steps)
        torch.cuda.set_sync_debug_mode("default")
    return waits


def main(options: argparse.Namespace) -> None:
    reference: np.ndarray | None = None
    for precision in options.precision:
        began = time.perf_counter()
        engine = make_engine(options, {"policy": "whole", "precision": precision})
        seconds = time.perf_counter() - began
        audio = options.tokens * 0.02
        whole, _, _ = speak(engine, 1, options.tokens, options.steps)
        line: dict[str, Any] = {"precision": precision, "policy": "whole", "load_s": round(seconds, 2)}
        if reference is None:
            reference = whole[0][0]
        line["against_first"] = quality(whole[0], reference)
        for batch in options.batch:
            _, _, wall = speak(engine, batch, options.tokens, options.steps)
            line[f"audio_s_per_s_{batch}"] = round(batch * audio / wall, 2)
        print(json.dumps(line), flush=True)
        engine.shutdown()
        for first, largest, ahead in options.chunks:
            decode = {"first_blocks": first, "largest_blocks": largest, "look_ahead_blocks": ahead}
            engine = make_engine(options, {"precision": precision, **decode})
            chunks, _, _ = speak(engine, 1, options.tokens, options.steps)
            line = {"precision": precision, "chunks": [first, largest, ahead], **quality(chunks[0], whole[0][0])}
            for batch in options.batch:
                speak(engine, batch, options.tokens, options.steps)  # warms it up
                _, first_s, total = speak(engine, batch, options.tokens, options.steps)
                line[f"first_ms_{batch}"] = round(1000 * first_s, 1)
                line[f"audio_s_per_s_{batch}"] = round(batch * audio / total, 2)
            if torch.cuda.is_available():
                line["host_waits"] = host_waits(engine, options)
                line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            print(json.dumps(line), flush=True)
            engine.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--load-format", default="")
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--precision", nargs="+", default=["float32"])
    parser.add_argument(
        "--chunks",
        type=lambda text: tuple(map(int, text.split(","))),
        nargs="+",
        default=[(1, 8, 0), (1, 8, 1), (1, 8, 2)],
        metavar="FIRST,LARGEST,AHEAD",
    )
    main(parser.parse_args())
