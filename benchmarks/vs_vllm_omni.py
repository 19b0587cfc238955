"""Runs the same workload through vllm-omni, in its own environment, for comparison with `benchmarks/serve.py`.

    python benchmarks/vs_vllm_omni.py --model DIR --site SITE --concurrency 1 8 32
    python benchmarks/vs_vllm_omni.py --model DIR --python /opt/vllm-omni/bin/python

`--site` is a folder of packages for this interpreter, `--python` another interpreter; one of them must have vllm-omni
(measured with 0.30.0). It serves the checkpoint with random weights, all three stages on GPU 0, eagerly and the vocoder
one request at a time, as its own example configurations do. None of our code runs in its processes. The columns and
their units are those of workload.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import workload
from workload import Sample

SAMPLE_RATE = 24_000
END_OF_SPEECH = 8294
# Settings of every stage, and those of thinker, talker and code2wav (which takes one request at a time).
COMMON = {
    "max_num_batched_tokens": 8192,
    "max_model_len": 4096,
    "max_num_seqs": 32,
    "enforce_eager": True,
    "trust_remote_code": True,
    "enable_prefix_caching": False,
    "devices": "0",
}
STAGES: tuple[dict[str, Any], ...] = (
    {"gpu_memory_utilization": 0.35, "mm_processor_cache_gb": 0},
    {"gpu_memory_utilization": 0.25},
    {
        "gpu_memory_utilization": 0.15,
        "max_num_seqs": 1,
        "dtype": "float32",
        "async_scheduling": False,
        "enable_flashinfer_autotune": False,
    },
)


def deployment(load_format: str) -> dict[str, Any]:
    """vllm-omni's description of the three stages."""
    stages = [{"stage_id": n, **COMMON, **own, "load_format": load_format} for n, own in enumerate(STAGES)]
    return {"async_chunk": False, "stages": stages}


def samples_in(output: Any) -> int:
    """Number of audio samples in one output of its last stage."""
    audio = output.multimodal_output.get("audio")
    parts = audio if isinstance(audio, list | tuple) else [audio]
    return sum(part.numel() for part in parts if part is not None)


async def drive(options: argparse.Namespace) -> dict[str, Any]:
    """Start vllm-omni, run the loads, stop it. Runs in vllm-omni's environment."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    began = time.perf_counter()
    omni = AsyncOmni(
        model=options.model,
        deploy_config=options.deployment,
        stage_init_timeout=options.start_timeout,
        init_timeout=options.start_timeout,
    )
    ready = time.perf_counter() - began
    print(f"vllm-omni is ready after {ready:.1f} s", file=sys.stderr, flush=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text, codec = options.text_tokens, options.codec_tokens
    parameters = [
        SamplingParams(temperature=0.0, max_tokens=text, min_tokens=text, ignore_eos=True, seed=42),
        SamplingParams(
            temperature=0.9,
            top_k=40,
            top_p=0.8,
            repetition_penalty=1.05,
            max_tokens=codec,
            min_tokens=codec,
            ignore_eos=True,
            seed=42,
            stop_token_ids=[END_OF_SPEECH],
        ),
        SamplingParams(temperature=0.0, max_tokens=2048, seed=42),
    ]

    async def ask(index: int) -> Sample:
        began = time.perf_counter()
        turns = [{"role": "user", "content": workload.prompt(index)}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        sample = Sample(prompt_tokens=len(tokenizer(prompt)["input_ids"]), text_tokens=text)
        stream = omni.generate({"prompt": prompt}, request_id=f"{index}-{began}", sampling_params_list=parameters)
        async for output in stream:
            now = time.perf_counter() - began
            sample.first_text = sample.first_text or now
            if output.final_output_type == "audio":
                sample.playback.add(now, samples_in(output) / SAMPLE_RATE)
        sample.total = time.perf_counter() - began
        if not sample.playback.seconds:
            raise RuntimeError(f"Request {index} was answered without sound; the last output was a {type(output)}.")
        return sample

    rows = []
    try:
        await ask(0)
        for concurrency in options.concurrency:
            count = options.rounds * concurrency
            rows.append(workload.summary(f"c={concurrency}", *await workload.closed_loop(ask, concurrency, count)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finally:
        omni.shutdown()
    return {"ready_s": round(ready, 1), "rows": rows, "versions": workload.versions()}


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Run this file in vllm-omni's environment; returns the result of `drive`.

    Raises:
        SystemExit: vllm-omni is not installed, or its run failed.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if options.site:
        environment["PYTHONPATH"] = options.site
    probe = [options.python, "-c", "import vllm_omni"]
    if subprocess.run(probe, env=environment, capture_output=True, timeout=120, check=False).returncode:
        raise SystemExit("vllm-omni does not import there; give its packages by --site or its interpreter by --python.")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(deployment(options.load_format), file)  # JSON is YAML
        file.flush()
        command = [options.python, __file__, *sys.argv[1:], "--deployment", file.name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vllm-omni's run ended with exit code {done.returncode}; its messages are above.")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(options: argparse.Namespace) -> None:
    if options.deployment:
        print(json.dumps(asyncio.run(drive(options))))
        return
    with workload.DeviceMemory() as memory:
        result = start(options)
    result["peak_device_memory_gib"] = [round(gib, 1) for gib in memory.peak_gib]
    print(f"ready after {result['ready_s']} s, peak memory: {memory}\n{workload.table(result['rows'])}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--site", help="folder of packages, put on PYTHONPATH")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=1, help="a round of 32 takes it a minute")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--codec-tokens", type=int, default=512)
    parser.add_argument("--start-timeout", type=int, default=400)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--deployment", help=argparse.SUPPRESS)
    main(parser.parse_args())
