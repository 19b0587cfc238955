"""Measures Qwen3-Omni's codec decoder alone, at its published sizes, with random weights: graphs, speed, precision.

    python benchmarks/codec_decoder.py --batch 1 8 16 32 --precision float32 tf32 bf16
    python benchmarks/codec_decoder.py --device cpu --batch 1 --frames 8

Prints one JSON object per precision, batch and length of chunk: milliseconds of a decode without and with a CUDA graph,
seconds of sound per second, and how far the samples are from those without a graph, and from those in float32, relative
to the peak. Utterances are decoded in the chunks that the policy makes, so that the state that they keep is compared
as well. Stops with an error if graphs and no graphs differ by more than 1 % of the peak.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

from omni_actors.engine.platform import prepare

prepare()

import torch  # noqa: E402
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig  # noqa: E402

from omni_actors.engine.diffusion_runner import DiffusionJob  # noqa: E402
from omni_actors.engine.models.chunks import ChunkPolicy  # noqa: E402
from omni_actors.engine.models.codec_decoder.batches import BatchedDecoder  # noqa: E402
from omni_actors.engine.models.codec_decoder.decoder import CodecDecoder  # noqa: E402
from omni_actors.engine.models.codec_decoder.stream import Carry, CodecStream, Cutting  # noqa: E402
from omni_actors.engine.models.qwen3_omni.code2wav import MeanEmbedding, codec_sizes  # noqa: E402

SECONDS_PER_FRAME = 0.08
MOST_DIFFERENT = 0.01


def make_decoder() -> CodecDecoder:
    """Published sizes; weights with which every layer hands on about as much as it gets, and no sound is clipped."""
    torch.manual_seed(0)
    sizes = codec_sizes(Qwen3OmniMoeCode2WavConfig())
    decoder = CodecDecoder(
        sizes, MeanEmbedding(sizes.num_quantizers, sizes.codebook_size, sizes.width), "code_embedding"
    )
    decoder.requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() > 1 and "embedding" not in name:
            torch.nn.init.normal_(parameter, std=0.7 * parameter[0].numel() ** -0.5)
    last = decoder.decoder[-1].conv
    last.bias.zero_()
    last.weight.mul_(1e-6)
    codes = torch.randint(sizes.codebook_size, (1, sizes.num_quantizers, 8))
    samples, _ = decoder(codes, torch.zeros(1, dtype=torch.int64), None)
    last.weight.mul_(0.6 / samples.abs().max())
    return decoder.eval()


def chunks(decoder: CodecDecoder, policy: ChunkPolicy, batch: int, frames: int) -> Iterator[list[DiffusionJob]]:
    """The chunks of `batch` utterances, those of the same place together."""
    cutting = Cutting(decoder.sizes, policy, 0, 4)
    generator = torch.Generator().manual_seed(1)
    streams = [CodecStream(cutting, Carry()) for _ in range(batch)]
    for stream in streams:
        count = frames * decoder.sizes.num_quantizers
        stream.extend(torch.randint(decoder.sizes.codebook_size, (count,), generator=generator).tolist(), complete=True)
    while not streams[0].finished:
        yield [job for stream in streams if (job := stream.next_job()) is not None]


def decode(batches: BatchedDecoder, policy: ChunkPolicy, batch: int, frames: int) -> tuple[torch.Tensor, float]:
    """Samples [batch, time], and the milliseconds of the last of the longest chunks."""
    pieces: list[torch.Tensor] = []
    milliseconds = 0.0
    for jobs in chunks(batches.decoder, policy, batch, frames):
        synchronize()
        began = time.perf_counter()
        samples, states = batches.decode([job.payload for job in jobs])
        synchronize()
        milliseconds = 1000 * (time.perf_counter() - began)
        for job, state in zip(jobs, states, strict=True):
            job.payload.carry.state = state
        pieces.append(torch.stack(samples).cpu())
    return torch.cat(pieces, dim=1), milliseconds


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    policy = ChunkPolicy(1, max(options.frames), 0)
    exact: dict[tuple[int, int], torch.Tensor] = {}
    for precision in options.precision:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision != "float32"
        decoder = make_decoder().to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
        eager = BatchedDecoder(decoder, device, max(options.batch))
        graphs = BatchedDecoder(decoder, device, max(options.batch))
        began = time.perf_counter()
        if cuda:
            lengths = Cutting(decoder.sizes, policy, 0, 4).lengths()
            graphs.capture(policy.first, lengths)
        seconds = time.perf_counter() - began
        for batch in options.batch:
            for frames in options.frames:
                utterance = ChunkPolicy(1, frames, 0)
                for _ in range(2):  # the first time chooses kernels
                    want, eager_ms = decode(eager, utterance, batch, 4 * frames)
                reference = exact.setdefault((batch, frames), want)
                line = {
                    "precision": precision,
                    "batch": batch,
                    "frames": frames,
                    "eager_ms": round(eager_ms, 2),
                    "from_float32": relative(want, reference),
                }
                if cuda:
                    for _ in range(2):
                        made, graph_ms = decode(graphs, utterance, batch, 4 * frames)
                    line |= {
                        "graph_ms": round(graph_ms, 2),
                        "sound_s_per_s": round(batch * frames * SECONDS_PER_FRAME * 1000 / graph_ms),
                        "graph_from_eager": relative(made, want),
                        "capture_s": round(seconds, 1),
                        "state_mib": round(graphs.state_bytes / 2**20, 2),
                        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                    }
                    if line["graph_from_eager"] > MOST_DIFFERENT:
                        raise SystemExit(f"Graphs change the sound: {line}")
                print(json.dumps(line), flush=True)


def relative(samples: torch.Tensor, reference: torch.Tensor) -> float:
    return round(float((samples - reference).abs().max() / reference.abs().max()), 7)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--precision", nargs="+", default=["float32", "tf32", "bf16"])
    with torch.inference_mode():
        main(parser.parse_args())
