"""Runs the same workload through vllm-omni, in its own environment, and through a pipeline of ours in the same run.

    python benchmarks/vs_vllm_omni.py --model DIR --site SITE --concurrency 1 8 32
    python benchmarks/vs_vllm_omni.py --model DIR --python /opt/vllm-omni/bin/python
    python benchmarks/vs_vllm_omni.py --family qwen3 --model DIR --peer-model PEER_DIR --site SITE --gpus 0 1
        --ours stage_configs/qwen3_omni.yaml --concurrency 1 8 32 64 --codec-tokens 128 --rounds 3

`--site` is a folder of packages for this interpreter, `--python` another interpreter; one of them must have vllm-omni
(measured with 0.30.0). It serves the checkpoint with random weights, all three stages on one GPU. Qwen2.5-Omni runs
eagerly and its vocoder one request at a time, as its own example configurations do; Qwen3-Omni with graphs,
compilation and async chunks, as its authors deploy it. Qwen3-Omni's vocoder captures its graphs when weights are
loaded, so `--peer-model` is a checkpoint with (random) weights of it; without such weights it runs eagerly. None of our
code runs in its stages. The columns and their units are those of workload.py.

With `--ours` both are measured by their own client library in one run: one after the other, ours first, or at the same
time, each on a GPU of its own (`--gpus`, ours first).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import workload
from workload import Sample

SAMPLE_RATE = 24_000
STOP_SECONDS = 10.0
ANSWER_SECONDS = 180.0  # the longest that the first answer, which compiles, may take
END_OF_SPEECH = 8294  # of Qwen2.5-Omni
HERE = Path(__file__).resolve().parent
STAGES = ("thinker", "talker", "code2wav")


def qwen2_5(options: argparse.Namespace) -> dict[str, Any]:
    """vllm-omni's description of Qwen2.5-Omni's stages; code2wav takes one request at a time."""
    common = {"max_num_batched_tokens": 8192, "max_model_len": 4096, "max_num_seqs": 32, "enforce_eager": True}
    common |= {"trust_remote_code": True, "enable_prefix_caching": False, "devices": "0"}
    common["load_format"] = options.load_format
    code2wav = {"max_num_seqs": 1, "dtype": "float32", "async_scheduling": False, "enable_flashinfer_autotune": False}
    own: tuple[dict[str, Any], ...] = (
        {"gpu_memory_utilization": 0.35, "mm_processor_cache_gb": 0},
        {"gpu_memory_utilization": 0.25},
        {"gpu_memory_utilization": 0.15, **code2wav},
    )
    return {"async_chunk": False, "stages": [{"stage_id": n, **common, **stage} for n, stage in enumerate(own)]}


def qwen3(options: argparse.Namespace) -> dict[str, Any]:
    """vllm-omni's description of Qwen3-Omni's stages, for one GPU of 139 GiB: its authors' for two of 80, otherwise."""
    shared_memory = "connector_of_shared_memory"
    weights = bool(list(Path(options.peer_model or options.model).glob("*.safetensors")))
    common = {"devices": "0", "max_num_seqs": 64, "trust_remote_code": True, "enable_prefix_caching": False}
    writes = {**common, "load_format": options.load_format, "max_num_batched_tokens": 32768, "max_model_len": 8192}
    writes["moe_backend"] = "triton"
    sizes = [1, 2, 4, *range(8, 65, 8)]
    thinker = {
        "gpu_memory_utilization": 0.62,
        "kv_cache_memory_bytes": 10 << 30,  # fixed, so that stages may start side by side
        "skip_mm_profiling": True,
        "compilation_config": {"custom_ops": ["+rotary_embedding"], "cudagraph_capture_sizes": [*sizes, 72, 96, 128]},
    }
    talker = {
        "gpu_memory_utilization": 0.20,
        "kv_cache_memory_bytes": 6 << 30,
        "compilation_config": {"cudagraph_capture_sizes": sizes},
        "input_connectors": {"from_stage_0": shared_memory},
    }
    code2wav = {
        "load_format": "auto" if weights else "dummy",
        "enforce_eager": not weights,
        "max_num_batched_tokens": 65536,
        "gpu_memory_utilization": 0.08,
        "enable_chunked_prefill": False,
        "async_scheduling": False,
        "input_connectors": {"from_stage_1": shared_memory},
    }
    chunks = {"initial_codec_chunk_frames": 4, "codec_chunk_frames": 25, "codec_left_context_frames": 25}
    stages = [{**writes, **thinker}, {**writes, **talker}, {**common, **code2wav}]
    return {
        "async_chunk": True,
        "connectors": {shared_memory: {"name": "SharedMemoryConnector", "extra": chunks}},
        "stages": [{"stage_id": number, **stage} for number, stage in enumerate(stages)],
    }


DEPLOYMENTS = {"qwen2.5": qwen2_5, "qwen3": qwen3}


def sampling(options: argparse.Namespace) -> list[Any]:
    """Its sampling parameters of the three stages; runs in its environment."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    text, codec = options.text_tokens, options.codec_tokens
    exactly: dict[str, Any] = {"ignore_eos": True}
    talker: dict[str, Any] = {"temperature": 0.9, "repetition_penalty": 1.05, "min_tokens": codec, "max_tokens": codec}
    vocoder: dict[str, Any] = {"temperature": 0.0, "max_tokens": 65536}
    if options.family == "qwen2.5":
        exactly["seed"] = vocoder["seed"] = 42
        talker |= {"top_k": 40, "top_p": 0.8, "stop_token_ids": [END_OF_SPEECH]}
        vocoder["max_tokens"] = 2048
    else:
        talker |= {"top_k": 50, "detokenize": False}
        exactly["output_kind"] = vocoder["output_kind"] = RequestOutputKind.DELTA
    return [
        SamplingParams(temperature=0.0, max_tokens=text, min_tokens=text, **exactly),
        SamplingParams(**talker, **exactly),
        SamplingParams(**vocoder),
    ]


def samples_in(output: Any) -> int:
    """Number of audio samples in one output of its last stage."""
    payload = output.multimodal_output
    audio = payload.get("audio") if payload.get("audio") is not None else payload.get("model_outputs")
    parts = audio if isinstance(audio, list | tuple) else [audio]
    return sum(int(part.numel() if hasattr(part, "numel") else part.size) for part in parts if part is not None)


def without_jit_warmup() -> None:
    """Turn vLLM's `enable_jit_warmup` off (30 to 70 s of a stage's start), for which its YAML has no field."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def created(self: Any, *args: Any, **options: Any) -> Any:
        config = create(self, *args, **options)
        config.kernel_config.enable_jit_warmup = False
        return config

    EngineArgs.create_engine_config = created  # type: ignore[method-assign]


async def drive(options: argparse.Namespace) -> dict[str, Any]:
    """Start vllm-omni, run the loads, stop it. Runs in vllm-omni's environment."""
    from transformers import AutoTokenizer
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    began = time.perf_counter()
    more: dict[str, Any] = {}
    if options.family == "qwen3":
        without_jit_warmup()
        more = {"parallel_stage_init": True, "log_stats": False}
    omni = AsyncOmni(
        model=options.peer_model or options.model,
        deploy_config=options.deployment,
        stage_init_timeout=options.start_timeout,
        init_timeout=options.start_timeout,
        **more,
    )
    ready = time.perf_counter() - began
    print(f"vllm-omni is ready after {ready:.1f} s", file=sys.stderr, flush=True)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    parameters = sampling(options)

    async def ask(index: int) -> Sample:
        began = time.perf_counter()
        turns = [{"role": "user", "content": workload.prompt(index)}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt)["input_ids"]
        sample = Sample(prompt_tokens=len(ids), text_tokens=options.text_tokens)
        given = {"prompt": prompt} if options.family == "qwen2.5" else {"prompt_token_ids": ids}
        async with asyncio.timeout(ANSWER_SECONDS):
            stream = omni.generate(given, request_id=f"{index}-{began}", sampling_params_list=list(parameters))
            async for output in stream:
                now = time.perf_counter() - began
                if output.final_output_type == "audio":
                    if count := samples_in(output):
                        sample.playback.add(now, count / SAMPLE_RATE)
                else:
                    sample.first_text = sample.first_text or now
        sample.total = time.perf_counter() - began
        if not sample.playback.seconds:
            raise RuntimeError(f"Request {index} was answered without sound; the last output was a {type(output)}.")
        return sample

    rows = []
    try:
        await ask(0)
        for concurrency in options.concurrency:
            if options.family == "qwen3":  # as serve.py does with ours
                await workload.closed_loop(ask, concurrency, concurrency)
            count = max(options.rounds * concurrency, 3)
            rows.append(workload.summary(f"c={concurrency}", *await workload.closed_loop(ask, concurrency, count)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    except Exception:  # what was measured before is worth having
        if not rows:
            raise
        traceback.print_exc()
    finally:
        stopping = threading.Thread(target=omni.shutdown, daemon=True)
        stopping.start()
        stopping.join(STOP_SECONDS)
    return {"ready_s": round(ready, 1), "rows": rows, "versions": workload.versions()}


def drive_to_end(options: argparse.Namespace) -> None:
    """`drive`, with its result as the only line on stdout. Ends the process: vllm-omni's threads may not."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its processes print there
    code = 1
    try:
        print(json.dumps(asyncio.run(drive(options))), file=out, flush=True)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)


def run_peer(options: argparse.Namespace, gpu: str | None) -> dict[str, Any]:
    """Run this file in vllm-omni's environment; returns the result of `drive`.

    Raises:
        SystemExit: vllm-omni is not installed, or its run failed.
    """
    environment = {**environment_on(gpu), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if options.site:
        environment["PYTHONPATH"] = os.pathsep.join((options.site, str(HERE.parent)))  # workload.py needs ours
    probe = [options.python, "-c", "import vllm_omni"]
    if subprocess.run(probe, env=environment, capture_output=True, timeout=300, check=False).returncode:
        raise SystemExit("vllm-omni does not import there; give its packages by --site or its interpreter by --python.")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(DEPLOYMENTS[options.family](options), file)  # JSON is YAML
        file.flush()
        command = [options.python, __file__, *sys.argv[1:], "--deployment", file.name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vllm-omni's run ended with exit code {done.returncode}; its messages are above.")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def ours_command(options: argparse.Namespace, report: Path) -> list[str]:
    """The command that measures our pipeline with the same load."""
    command = [sys.executable, str(HERE / "serve.py"), options.ours, "--model", options.model, "--json", str(report)]
    for stage in STAGES:
        command += ["--set", f"stages.{stage}.engine.load_format={options.load_format}"]
    for change in options.set:
        command += ["--set", change]
    command += ["--rounds", str(options.rounds), "--text-tokens", str(options.text_tokens)]
    return [*command, "--codec-tokens", str(options.codec_tokens), "--concurrency", *map(str, options.concurrency)]


def run_ours(options: argparse.Namespace, gpu: str | None) -> dict[str, Any]:
    """Measure our pipeline. Raises `SystemExit` if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "ours.json"
        done = subprocess.run(ours_command(options, report), env=environment_on(gpu), stdout=sys.stderr, check=False)
        if done.returncode:
            raise SystemExit(f"Our run ended with exit code {done.returncode}; its messages are above.")
        result: dict[str, Any] = json.loads(report.read_text())
        return result


def environment_on(gpu: str | None) -> dict[str, str]:
    """This process's environment, on one of the GPUs."""
    return {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})}


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The results by system: one after the other, or at the same time on two GPUs."""
    runs = {"ours": run_ours} if options.ours else {}
    runs["vllm-omni"] = run_peer
    gpus: Sequence[str | None] = options.gpus or [None]
    with ThreadPoolExecutor(len(set(gpus))) as pool:
        started = {
            name: pool.submit(run, options, gpus[index % len(gpus)]) for index, (name, run) in enumerate(runs.items())
        }
        return {name: run.result() for name, run in started.items()}


def main(options: argparse.Namespace) -> None:
    if options.deployment:
        drive_to_end(options)
    with workload.DeviceMemory() as memory:
        results = measure(options)
    rows = [{"system": name, **row} for name, result in results.items() for row in result["rows"]]
    rows.sort(key=lambda row: int(row["load"].removeprefix("c=")))
    ready = ", ".join(f"{name} {result['ready_s']} s" for name, result in results.items())
    print(f"ready after: {ready}; peak memory: {memory}\n{workload.table(rows)}")
    if options.json:
        facts = {"peak_device_memory_gib": [round(gib, 1) for gib in memory.peak_gib], "command": sys.argv}
        options.json.write_text(json.dumps({**facts, **results}, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=DEPLOYMENTS, default="qwen2.5")
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer-model", help="checkpoint for vllm-omni, with the same vocabulary; default: --model")
    parser.add_argument("--ours", metavar="CONFIG", help="measure this pipeline of ours in the same run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it")
    parser.add_argument("--gpus", nargs="+", help="of ours and of vllm-omni, which then run at the same time")
    parser.add_argument("--site", help="folder of packages, put on PYTHONPATH")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=1, help="a round of 32 takes Qwen2.5-Omni there a minute")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument("--codec-tokens", type=int, default=512)
    parser.add_argument("--start-timeout", type=int, default=400)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--deployment", help=argparse.SUPPRESS)
    main(parser.parse_args())
