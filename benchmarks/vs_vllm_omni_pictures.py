"""Measures the pictures of vllm-omni, in its own environment, to compare pictures.py with, on the same GPU.

    python -m tools.checkpoints full-z-image /dev/shm/z-image
    python benchmarks/vs_vllm_omni_pictures.py --model /dev/shm/z-image --site SITE --sizes 1024x1024 512x512

`--site` is a folder of packages for this interpreter, `--python` another interpreter; one of them must have vllm-omni.
0.30.0 has Z-Image (`ZImagePipeline` in its registry of diffusion models) and, of Qwen-Image, the first generation only,
so Qwen-Image-2.1 is not compared. It has no random weights for pictures (`dummy` leaves them out): what the folder
lacks is written there first, 20 GiB, which takes 16 GiB of the GPU for a moment.

One picture at a time, from a prompt to a PNG file in memory (Pillow's fastest), through its offline class with its
defaults, so compiled; the text encoder is included, HTTP is not. `picture_s` is the median of `--rounds`, after one
that does not count, and `file_ms` the part of the file in it. None of our code runs in its processes.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import workload

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "a red fox in the snow at the edge of a wood, in the last light of a winter's day, " * 4  # some 100 tokens


def write_weights(folder: Path) -> None:
    """Random weights, as the models' classes draw them, for each part of a checkpoint that has none."""
    import picture_equality
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tools.checkpoints import z_image

    def encoder() -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "text_encoder"))

    makers = {"transformer": z_image.full_transformer, "vae": z_image.full_vae, "text_encoder": encoder}
    for part, make in makers.items():
        if not list((folder / part).glob("*.safetensors")):
            with torch.device("cuda"), picture_equality.default_dtype(torch.bfloat16):
                model = make().to(torch.bfloat16)
            if part == "transformer":
                model = picture_equality.drawn(model, picture_equality.ZImage.branches, len(model.layers))
            model.save_pretrained(folder / part)
            print(f"random weights of the {part} are written", file=sys.stderr, flush=True)
            del model
            gc.collect()
            torch.cuda.empty_cache()


def drive(options: argparse.Namespace) -> dict[str, Any]:
    """Start vllm-omni and paint. Runs in vllm-omni's environment."""
    from vllm_omni.diffusion.utils.image_output import extract_images_from_outputs
    from vllm_omni.entrypoints.omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    began = time.perf_counter()
    omni = Omni(model=options.model, stage_init_timeout=options.start_timeout, init_timeout=options.start_timeout)
    ready = time.perf_counter() - began
    print(f"vllm-omni is ready after {ready:.1f} s", file=sys.stderr, flush=True)

    def paint(size: str, seed: int) -> tuple[float, float]:
        width, height = map(int, size.split("x"))
        parameters = OmniDiffusionSamplingParams(
            width=width, height=height, num_inference_steps=options.steps, guidance_scale=0.0, seed=seed
        )
        began = time.perf_counter()
        outputs = omni.generate({"prompt": PROMPT, "modalities": ["image"]}, parameters, use_tqdm=False)
        (image,) = extract_images_from_outputs(outputs)
        made = time.perf_counter()
        if image.size != (width, height):
            raise RuntimeError(f"asked for {size}, got {image.size}")
        image.save(io.BytesIO(), "PNG", compress_level=1)
        done = time.perf_counter()
        return done - began, done - made

    rows = []
    for size in options.sizes:
        paint(size, 0)
        totals, files = zip(*(paint(size, seed) for seed in range(1, options.rounds + 1)), strict=True)
        rows.append(
            {
                "size": size,
                "steps": options.steps,
                "picture_s": round(statistics.median(totals), 3),
                "slowest_s": round(max(totals), 3),
                "file_ms": round(1000 * statistics.median(files)),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    omni.close()
    return {"ready_s": round(ready, 1), "rows": rows, "versions": workload.versions()}


def run_there(options: argparse.Namespace) -> dict[str, Any]:
    """Run this file in vllm-omni's environment; returns the result of `drive`.

    Raises:
        SystemExit: vllm-omni is not installed, or its run failed.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if options.site:
        environment["PYTHONPATH"] = os.pathsep.join((options.site, str(ROOT)))  # ROOT: for workload.py
    probe = [options.python, "-c", "import vllm_omni"]
    if subprocess.run(probe, env=environment, capture_output=True, timeout=120, check=False).returncode:
        raise SystemExit("vllm-omni does not import there; give its packages by --site or its interpreter by --python.")
    command = [options.python, __file__, *sys.argv[1:], "--inside"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vllm-omni's run ended with exit code {done.returncode}; its messages are above.")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main(options: argparse.Namespace) -> None:
    if options.inside:
        print(json.dumps(drive(options)))
        return
    write_weights(Path(options.model))
    with workload.DeviceMemory() as memory:
        result = run_there(options)
    result["peak_device_memory_gib"] = [round(gib, 1) for gib in memory.peak_gib]
    print(f"ready after {result['ready_s']} s, peak memory: {memory}\n{workload.table(result['rows'])}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a full-z-image checkpoint, which gets weights")
    parser.add_argument("--site", help="folder of packages, put on PYTHONPATH")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--sizes", nargs="+", default=["1024x1024"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--start-timeout", type=int, default=400)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    main(parser.parse_args())
