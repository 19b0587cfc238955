"""Measures the denoising step of pictures on one GPU; pictures.py measures a running pipeline.

    python benchmarks/images.py --microbench
    python benchmarks/images.py --microbench --model qwen-image --references 0

The packed step of the transformer of Z-Image, or of Qwen-Image, at published sizes with random weights: milliseconds
per step for pictures of 512, 1024 and 2048 pixels, 1, 4 and 8 at a time, and for one of each size in one batch, each
with a prompt of 100 tokens; Qwen-Image's also with `--references` pictures of 1024 pixels that it is made from, whose
keys and values each step reads. `sdpa` calls PyTorch's attention once per run of equal sequences, `flash` PyTorch's
flash attention for packed sequences, `vllm` that of vLLM where it is installed; `+c` is with `torch.compile`, or for
Qwen-Image with kernels of our own. Below, for the fastest of them: what a step computes, and how many pictures of 8
steps a second that would be. It answers how many tokens a step should take: as many as it needs for a larger batch to
gain nothing.

Needs torch and nothing else, 16 GiB of the device and about two minutes; `--seconds` ends it earlier. `--tiny` runs the
same at toy size on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

ROOT = Path(__file__).resolve().parent.parent
MODELS = "omni_actors.engine.models"

if "omni_actors" not in sys.modules:
    # The networks need torch only; the packages around them need vLLM. So they stand here as empty folders.
    parts = [".".join(MODELS.split(".")[:depth]) for depth in range(1, MODELS.count(".") + 2)]
    for name in (*parts, *(f"{MODELS}.{family}" for family in ("pictures", "z_image", "qwen_image"))):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]

from omni_actors.engine.models.pictures.network import without_weights  # noqa: E402
from omni_actors.engine.models.pictures.packing import attend_each, attend_varlen, vllm_attention  # noqa: E402
from omni_actors.engine.models.qwen_image import dit as qwen_image  # noqa: E402
from omni_actors.engine.models.qwen_image import prefix  # noqa: E402
from omni_actors.engine.models.z_image import dit as z_image  # noqa: E402

if TYPE_CHECKING:
    from omni_actors.engine.models.pictures.network import PackedNetwork
    from omni_actors.engine.models.pictures.packing import Attention

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


class ZImage:
    """What is measured of Z-Image."""

    name = "Z-Image"

    def __init__(self, tiny: bool) -> None:
        sizes = {"channels": 4, "width": 96, "layers": 2, "heads": 3, "text_width": 48}
        turns = {"axes": (8, 12, 12), "lengths": (256, 64, 64)}
        self.config = z_image.DitConfig(**sizes, **turns) if tiny else z_image.DitConfig()
        self.channels = self.config.patch_width

    def network(self) -> PackedNetwork:
        return z_image.Dit(self.config)

    def condition(self) -> torch.Tensor:
        return torch.randn(PROMPT_TOKENS, self.config.text_width)

    def teraflops(self, sizes: Sequence[int]) -> float:
        """What a step computes for square pictures of these sizes, in TFLOP; matrix products and attention only."""
        config = self.config
        block = 4 * config.width**2 + 3 * config.width * int(config.width / 3 * 8)
        total = 0.0
        for size in sizes:
            picture = (size // PIXELS) ** 2
            for layers, tokens in ((config.refiners, picture), (config.layers, picture + PROMPT_TOKENS)):
                total += layers * (2 * tokens * block + 4 * tokens**2 * config.width)
        return total / 1e12


class QwenImage:
    """What is measured of Qwen-Image; each picture is made from so many others."""

    name = "Qwen-Image"

    def __init__(self, tiny: bool, references: int) -> None:
        sizes = {"channels": 16, "layers": 2, "heads": 3, "head_width": 32, "text_width": 48}
        self.config = qwen_image.DitConfig(**sizes, axes=(8, 12, 12)) if tiny else qwen_image.DitConfig()
        self.channels = self.config.channels
        self._edge, self._references = (4 if tiny else 64), references

    def network(self) -> PackedNetwork:
        return qwen_image.Dit(self.config)

    def condition(self) -> prefix.Prefix:
        states = torch.randn(PROMPT_TOKENS, self.config.text_width)
        references = [torch.randn(self.channels, self._edge, self._edge) for _ in range(self._references)]
        lengths = (1,) * len(references) + (len(states) - len(references),)
        return prefix.Prefix(prefix.Condition(states, lengths, tuple(references)))

    def teraflops(self, sizes: Sequence[int]) -> float:
        """What a step computes for square pictures of these sizes, in TFLOP; matrix products and attention only."""
        config, total = self.config, 0.0
        before = PROMPT_TOKENS + self._references * self._edge**2
        block = (4 + 3 * config.widening) * config.width**2
        for size in sizes:
            tokens = (size // PIXELS) ** 2
            total += config.layers * (2 * tokens * block + 4 * tokens * (tokens + before) * config.width)
        return total / 1e12


def step_of(model: ZImage | QwenImage, dit: PackedNetwork, sizes: Sequence[int]) -> Callable[[], torch.Tensor]:
    """One denoising step of square pictures of these sizes, in pixels."""
    edges = [size // PIXELS for size in sizes]
    (condition,) = dit.condition([model.condition()])
    batch = dit.lay_out([(edge, edge) for edge in edges], [condition] * len(edges))
    tokens = sum(edge * edge for edge in edges)
    patches = torch.randn(tokens, model.channels, device=dit.device)
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
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # our kernels, on the CPU
    ends = time.monotonic() + options.seconds
    device = torch.device("cpu" if options.tiny else "cuda")
    model = QwenImage(options.tiny, options.references) if options.model == "qwen-image" else ZImage(options.tiny)
    sizes = (32, 64, 128) if options.tiny else (512, 1024, 2048)
    cells = [(size,) * count for size in sizes for count in (1, 4, 8)] + [sizes]
    cells.sort(key=model.teraflops)  # what is left out for lack of time is the longest
    name = "the CPU" if options.tiny else torch.cuda.get_device_name()
    what = f"{model.name}'s transformer"
    print(f"{what}, {name}, torch {torch.__version__}, bfloat16, random weights; ms per step", flush=True)
    times: dict[str, dict[tuple[int, ...], float]] = {}
    with torch.inference_mode():
        dit = without_weights(model.network, device, torch.bfloat16)
        dit.draw()
        for suffix in ("", COMPILED):
            if suffix:
                dit.compile(**({"backend": "aot_eager"} if options.tiny else {}))
            for cell in cells if suffix else [cell for cell in cells if model.teraflops(cell) < EAGER_TERAFLOPS]:
                for kind, attend in attentions().items():
                    if time.monotonic() < ends:
                        dit.attend = attend
                        times.setdefault(kind + suffix, {})[cell] = milliseconds(step_of(model, dit, cell), device)
        report(model, cells, times)
        if device.type == "cuda":
            # With the attention that was set last: one launch per layer, as with each that packs.
            launch = launch_milliseconds(step_of(model, dit, cells[0]))
            print(f"the host launches a step of 1 x {sizes[0]} in {launch:.1f} ms")
            print(f"at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the device were in use")


def report(
    model: ZImage | QwenImage, cells: Sequence[tuple[int, ...]], times: dict[str, dict[tuple[int, ...], float]]
) -> None:
    head = ["pictures", "tokens", *times, "TFLOP", "TFLOP/s", "8 steps, pictures/s"]
    lines = [head]
    for cell in sorted(cells):
        row = {column: measured[cell] for column, measured in times.items() if cell in measured}
        mixed = len(set(cell)) > 1
        pictures = " + ".join(map(str, cell)) if mixed else f"{len(cell)} x {cell[0]}"
        tokens = sum((size // PIXELS) ** 2 for size in cell)
        work = model.teraflops(cell)
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
    parser.add_argument("--model", choices=["z-image", "qwen-image"], default="z-image")
    parser.add_argument("--references", type=int, default=0, help="pictures that each is made from (qwen-image)")
    parser.add_argument("--seconds", type=float, default=150, help="begin no measurement after so long (default: 150)")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    given = parser.parse_args()
    if given.references and given.model == "z-image":
        parser.error("--references: Z-Image makes pictures from text only")
    microbench(given)
