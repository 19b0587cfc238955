"""Measures on one GPU where the time of Qwen-Image's denoising step and of its VAE goes, and what each remedy gives.

    python benchmarks/image_parts.py --seconds 60

Published sizes, random weights, bfloat16; a prompt of 100 tokens. For the step of pictures of these sizes: its time
(the median of five), the time of its kernels by group, with how often and how long each of the small ones ran, and what
is left, in which the device was idle. `fused` computes what is between products and attention in kernels of our own,
which is what a pipeline does; `graph` replays the same as a CUDA graph; `lt` takes all products from cuBLASLt; `torch`
leaves what is between them to PyTorch, which `compiled` compiles. Attention is also timed alone, and the VAE's decoder:
ours, ours with convolutions that cuDNN has chosen by measuring them, and diffusers'.

What did not begin after `--seconds` is left out. `--tiny` runs the same at toy size on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

import images
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from omni_actors.engine.models.pictures.between import Between, CompiledBetween, FusedBetween
from omni_actors.engine.models.pictures.network import without_weights
from omni_actors.engine.models.pictures.packing import attend_each, fastest_attention, pack
from omni_actors.engine.models.qwen_image.vae_decoder import PictureDecoder

Step = Callable[[], torch.Tensor]
GROUPS = {  # by parts of the kernels' names
    "attention": ("flash", "fmha", "sdpa"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "conv", "fprop", "winograd"),
}
SMALL_KERNELS = 8  # that are listed


class Clock:
    """Says whether there is time for another measurement."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    def left(self, what: str) -> bool:
        if time.monotonic() < self._ends:
            return True
        print(f"{what}: left out, the time is over", flush=True)
        return False


def graphed(step: Step) -> Step:
    """The step as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def kernels(step: Step) -> dict[str, list[float]]:
    """Milliseconds of each run of each kernel of a step, by the kernel's name."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    found = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us() / 1000)
    return found


def describe(what: str, step: Step, device: torch.device, *, details: bool) -> None:
    """Print a step's time and where it goes."""
    total = images.milliseconds(step, device)
    line = f"{what}: {total:.2f} ms"
    if device.type != "cuda":
        print(line, flush=True)
        return
    groups, small = dict.fromkeys([*GROUPS, "small"], 0.0), {}
    found = kernels(step)
    for name, times in found.items():
        group = next((group for group, parts in GROUPS.items() if any(part in name.lower() for part in parts)), "small")
        groups[group] += sum(times)
        if group == "small":
            small[name] = times
    shares = ", ".join(f"{group} {spent:.2f}" for group, spent in groups.items())
    runs = sum(map(len, found.values()))
    print(f"{line}; {shares}; {runs} kernels; idle {total - sum(groups.values()):.2f}", flush=True)
    for name, times in sorted(small.items(), key=lambda item: -sum(item[1]))[: SMALL_KERNELS if details else 0]:
        mean = 1000 * sum(times) / len(times)
        print(f"    {sum(times):6.2f} ms = {len(times):4} x {mean:6.1f} us  {name[:90]}", flush=True)


@contextlib.contextmanager
def products_of(library: str) -> Iterator[None]:
    """Take matrix products from this library."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def steps(model: images.QwenImage, sizes: list[int], device: torch.device, clock: Clock, tiny: bool) -> None:
    """What a step takes, in each way of computing it."""
    dit = without_weights(model.network, device, torch.bfloat16)
    dit.draw()
    dit.attend = fastest_attention(device.type, torch.bfloat16)
    ways = ["fused", "graph", "lt", "torch", "compiled"] if device.type == "cuda" else ["torch", "compiled"]
    for way in ways:
        if way == "compiled":
            dit.between = CompiledBetween(**({"backend": "aot_eager"} if tiny else {}))
        else:
            dit.between = Between() if way == "torch" else FusedBetween()
        for cell in ((sizes[-1],), (sizes[0],), (sizes[0],) * 2):
            what = f"step {way} {'+'.join(map(str, cell))}"
            if not clock.left(what):
                return
            step = images.step_of(model, dit, cell)
            with products_of("cublaslt") if way == "lt" else contextlib.nullcontext():
                describe(what, graphed(step) if way == "graph" else step, device, details=way in ("fused", "compiled"))


def attention(model: images.QwenImage, size: int, device: torch.device, clock: Clock) -> None:
    """What the attention of one layer takes alone."""
    config = model.config
    tokens = (size // images.PIXELS) ** 2
    whole = tokens + images.PROMPT_TOKENS
    shape = (config.heads, config.head_width)
    query = torch.randn(tokens, *shape, device=device, dtype=torch.bfloat16)
    key, value = torch.randn(2, whole, *shape, device=device, dtype=torch.bfloat16)
    packings = pack([tokens], device), pack([whole], device)
    work = 4 * tokens * whole * config.heads * config.head_width / 1e9
    fastest = fastest_attention(device.type, torch.bfloat16)
    backends = {"pipeline": None, "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for name, backend in backends.items() if device.type == "cuda" else [("pipeline", None)]:
        if not clock.left(f"attention {name}"):
            return

        def once(backend: SDPBackend | None = backend) -> torch.Tensor:
            attend = fastest if backend is None else attend_each
            with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
                for _ in range(config.layers):
                    result = attend(query, key, value, *packings)
            return result

        taken = images.milliseconds(once, device)
        rate = work * config.layers / taken
        print(f"attention {name} {size}: {taken:.2f} ms for all layers, {rate:.0f} TFLOP/s", flush=True)


def decoder(sizes: list[int], device: torch.device, clock: Clock, tiny: bool) -> None:
    """What the VAE takes for a picture, from latents to values of pixels."""
    from diffusers import AutoencoderKLQwenImage21

    toy = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 16, "dim_mult": [1, 2, 2, 2, 2], "num_res_blocks": 1}
    with device:
        vae = AutoencoderKLQwenImage21(**(toy if tiny else {})).to(torch.bfloat16)
    vae = vae.requires_grad_(False).eval()
    ours: PictureDecoder | None = None
    for way in ("diffusers", "ours", "ours, chosen by measuring"):
        torch.backends.cudnn.benchmark = way.endswith("measuring")
        if way != "diffusers" and ours is None:
            ours = PictureDecoder(vae, fused=device.type == "cuda")
        for size in sizes:
            what = f"VAE {way} {size}"
            if not clock.left(what):
                return
            latents = torch.randn(vae.config.z_dim, size // 16, size // 16, device=device, dtype=torch.bfloat16)

            def once(latents: torch.Tensor = latents, mine: PictureDecoder | None = ours) -> torch.Tensor:
                if mine is not None:
                    return mine(latents)
                picture: torch.Tensor = vae.decode(latents[None, :, None], return_dict=False)[0]
                return picture

            describe(what, once, device, details=size == sizes[-1])
    torch.backends.cudnn.benchmark = False
    latents = torch.randn(vae.config.z_dim, 16, 16, device=device, dtype=torch.bfloat16)
    theirs = vae.decode(latents[None, :, None], return_dict=False)[0][0, :, 0]
    mine = PictureDecoder(vae, fused=device.type == "cuda")(latents)
    apart = F.mse_loss(theirs.float(), mine.float()).sqrt() / theirs.float().std()
    print(f"VAE: ours is {apart:.1e} of diffusers' standard deviation away from it", flush=True)


@torch.inference_mode()
def main(options: argparse.Namespace) -> None:
    device = torch.device("cpu" if options.tiny else "cuda")
    clock = Clock(options.seconds)
    model = images.QwenImage(options.tiny, references=0)
    name = "the CPU" if options.tiny else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, bfloat16, random weights; milliseconds", flush=True)
    sizes = [32, 64] if options.tiny else [512, 1024]
    attention(model, sizes[-1], device, clock)
    decoder(sizes, device, clock, options.tiny)
    steps(model, sizes, device, clock, options.tiny)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="begin no measurement after so long (default: 60)")
    parser.add_argument("--tiny", action="store_true", help="toy size, on the CPU")
    main(parser.parse_args())
