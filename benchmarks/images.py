"""Measures the denoising step of pictures on one GPU; pictures.py measures a running pipeline.

    python benchmarks/images.py --microbench

The packed step of Z-Image's transformer at published sizes with random weights: milliseconds per step for pictures of
512, 1024 and 2048 pixels, 1, 4 and 8 at a time, and for one of each size in one batch, each with a prompt of 100
tokens. `sdpa` calls PyTorch's attention once per run of equal sequences, `flash` PyTorch's flash attention for packed
sequences, `vllm` that of vLLM where it is installed; `+c` is with `torch.compile`. Below, for the fastest of them: what
a step computes, and how many pictures of 8 steps a second that would be. It answers how many tokens a step should take:
as many as it needs for a larger batch to gain nothing.

Needs torch and nothing else, 16 GiB of the device and about two minutes; `--seconds` ends it earlier. `--tiny` runs the
same at toy size on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "omni_actors.engine.models.z_image"

if "omni_actors" not in sys.modules:
    # The network needs torch only; the packages around it need vLLM. So they stand here as empty folders.
    for depth in range(1, FOLDER.count(".") + 2):
        name = ".".join(FOLDER.split(".")[:depth])
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]

from omni_actors.engine.models.z_image.dit import Dit, DitConfig  # noqa: E402
from omni_actors.engine.models.z_image.packing import attend_each, attend_varlen, vllm_attention  # noqa: E402

if TYPE_CHECKING:
    from omni_actors.engine.models.z_image.packing import Attention

TINY = DitConfig(channels=4, width=96, layers=2, heads=3, text_width=48, axes=(8, 12, 12), lengths=(256, 64, 64))
PROMPT_TOKENS = 100
PIXELS = 16  # along an edge of a token
COMPILED = "+c"
EAGER_TERAFLOPS = 100.0  # of a step; longer ones are measured compiled only, where launches no longer count


def attentions() -> dict[str, Attention]:
    """What there is on this machine, by the name in the table."""
    found: dict[str, Attention] = {"sdpa": attend_each}
    if torch.cuda.is_available():
        found["flash"] = attend_varlen
    if vllm := vllm_attention():
        found["vllm"] = vllm
    return found


def teraflops(config: DitConfig, sizes: Sequence[int]) -> float:
    """What a step computes for square pictures of these sizes, in TFLOP; matrix products and attention only."""
    block = 4 * config.width**2 + 3 * config.width * int(config.width / 3 * 8)
    total = 0.0
    for size in sizes:
        picture = (size // PIXELS) ** 2
        for layers, tokens in ((config.refiners, picture), (config.layers, picture + PROMPT_TOKENS)):
            total += layers * (2 * tokens * block + 4 * tokens**2 * config.width)
    return total / 1e12


def step_of(dit: Dit, sizes: Sequence[int]) -> Callable[[], torch.Tensor]:
    """One denoising step of square pictures of these sizes, in pixels."""
    edges = [size // PIXELS for size in sizes]
    states = torch.randn(PROMPT_TOKENS, dit.config.text_width)
    batch = dit.lay_out([(edge, edge) for edge in edges], dit.refine_text([states] * len(edges)))
    tokens = sum(edge * edge for edge in edges)
    patches = torch.randn(tokens, dit.config.patch_width, device=dit.device)
    moments = torch.linspace(0.1, 0.9, len(edges), device=dit.device)
    return lambda: dit(patches, moments, batch)


def milliseconds(step: Callable[[], torch.Tensor], device: torch.device) -> float:
    """The time of a step: the median of five, of fewer if they are long, after one that does not count."""

    def once() -> float:
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first = once()
    times = sorted(once() for _ in range(5 if first < 0.3 else 2 if first < 1 else 1))
    return 1000 * times[len(times) // 2]


def launch_milliseconds(step: Callable[[], torch.Tensor]) -> float:
    """How long the host needs to launch a step, after one that does not count; the device may still compute then."""
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - began)


def microbench(options: argparse.Namespace) -> None:
    ends = time.monotonic() + options.seconds
    device = torch.device("cpu" if options.tiny else "cuda")
    config = TINY if options.tiny else DitConfig()
    sizes = (32, 64, 128) if options.tiny else (512, 1024, 2048)
    cells = [(size,) * count for size in sizes for count in (1, 4, 8)] + [sizes]
    cells.sort(key=lambda cell: teraflops(config, cell))  # what is left out for lack of time is the longest
    name = "the CPU" if options.tiny else torch.cuda.get_device_name()
    print(
        f"Z-Image's transformer, {name}, torch {torch.__version__}, bfloat16, random weights; ms per step", flush=True
    )
    times: dict[str, dict[tuple[int, ...], float]] = {}
    with torch.inference_mode():
        dit = Dit.without_weights(config, device, torch.bfloat16)
        dit.draw()
        for suffix in ("", COMPILED):
            if suffix:
                dit.compile(**({"backend": "aot_eager"} if options.tiny else {}))
            for cell in cells if suffix else [cell for cell in cells if teraflops(config, cell) < EAGER_TERAFLOPS]:
                for kind, attend in attentions().items():
                    if time.monotonic() < ends:
                        dit.attend = attend
                        times.setdefault(kind + suffix, {})[cell] = milliseconds(step_of(dit, cell), device)
        report(config, cells, times)
        if device.type == "cuda":
            # With the attention that was set last: one launch per layer, as with each that packs.
            print(f"the host launches a step of 1 x {sizes[0]} in {launch_milliseconds(step_of(dit, cells[0])):.1f} ms")
            print(f"at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the device were in use")


def report(config: DitConfig, cells: Sequence[tuple[int, ...]], times: dict[str, dict[tuple[int, ...], float]]) -> None:
    head = ["pictures", "tokens", *times, "TFLOP", "TFLOP/s", "8 steps, pictures/s"]
    lines = [head]
    for cell in sorted(cells):
        row = {column: measured[cell] for column, measured in times.items() if cell in measured}
        mixed = len(set(cell)) > 1
        pictures = " + ".join(map(str, cell)) if mixed else f"{len(cell)} x {cell[0]}"
        tokens = sum((size // PIXELS) ** 2 for size in cell)
        work = teraflops(config, cell)
        line = [pictures, str(tokens), *(f"{row[column]:.1f}" if column in row else "-" for column in times)]
        best = min(row.values(), default=None)
        rest = ["-", "-"] if best is None else [f"{work / best * 1000:.0f}", f"{1000 * len(cell) / best / 8:.2f}"]
        lines.append([*line, f"{work:.1f}", *rest])
    widths = [max(len(line[index]) for line in lines) for index in range(len(head))]
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbench", action="store_true", required=True, help="the step of the transformer alone")
    parser.add_argument("--seconds", type=float, default=150, help="begin no measurement after so long (default: 150)")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    microbench(parser.parse_args())
