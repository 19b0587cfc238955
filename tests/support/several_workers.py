"""A stage on several workers: `python -m tests.support.several_workers CHECKPOINT STAGE JSON`; prints answers.

JSON holds the fields of vLLM's EngineArgs that spread the stage.

It runs as a separate process, because it starts workers: as a stage does (vLLM spawns them, and they import this file
first, and with it what vLLM needs to run here), or forked, which takes a third of the time. After it has printed its
answers it keeps its workers until its standard input closes.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
from pathlib import Path

from omni_actors.engine.platform import prepare

prepare()

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
from vllm.v1.executor import multiproc_executor  # noqa: E402

from omni_actors.engine.models.frame_talker import FrameTalkerAdapter  # noqa: E402
from omni_actors.engine.rows import to_host, to_torch  # noqa: E402
from omni_actors.stage.engine_interface import StageInputs  # noqa: E402
from tests.support.stage_driver import Driver, encode_media_prompt, make_engine  # noqa: E402

START = "OMNI_TEST_START_WORKERS"  # spawn or fork
LENGTHS = (5, 33, 90)
MEDIA_PROMPTS = {
    "qwen2_5_omni": "<|audio_bos|><|AUDIO|><|audio_eos|><|vision_bos|><|IMAGE|><|vision_eos|>What is this?",
    "qwen3_omni_moe": "<|audio_start|><|audio_pad|><|audio_end|><|vision_start|><|image_pad|><|vision_end|>What is it?",
}


def inputs_of(driver: Driver, stage: str, index: int) -> tuple[StageInputs, torch.Tensor | list[int] | None]:
    """Inputs of a request, and the rows or tokens that follow later."""
    generator = torch.Generator().manual_seed(index)
    length = LENGTHS[index]
    texts = torch.randint(3, 200, (length + 20,), generator=generator).tolist()
    if stage == "thinker":
        return StageInputs(token_ids=texts[:length]), None
    if isinstance(driver.engine.adapter, FrameTalkerAdapter):
        whole = driver.engine.adapter.warm_up_inputs(length)  # turns of the user and the assistant around zeros
        given = [token or text for token, text in zip(whole.token_ids, texts, strict=False)]
        return StageInputs(token_ids=given, scalars=whole.scalars, complete=False), texts[:12]
    rows = torch.randn(length + 20, driver.engine.adapter.row_width, generator=generator)
    tensors = {"prompt_rows": to_host(rows[:length]), "reply_rows": to_host(rows[length : length + 3])}
    if index == 1:  # as of a prompt with media
        tensors["mrope_positions"] = to_host(torch.stack([torch.arange(length - 1) // part for part in (1, 2, 3)]))
    return StageInputs(tensors=tensors, complete=False), rows[length + 3 :]


def media_prompt(checkpoint: str) -> StageInputs:
    family = json.loads((Path(checkpoint) / "config.json").read_text())["model_type"]
    samples = (np.sin(np.arange(16000) * 0.05) * 0.3).astype(np.float32)
    pixels = np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8)
    return encode_media_prompt(Path(checkpoint), MEDIA_PROMPTS[family], {"audio": (samples, 16000), "image": pixels})


def answer(driver: Driver, checkpoint: str, stage: str) -> dict[str, object]:
    """Tokens, sums of the rows, state left behind and workers, for requests that join one after the other.

    The last one is sampled, the others are greedy.
    """

    def follow(name: str, later: torch.Tensor | list[int], *, complete: bool) -> None:
        if isinstance(later, list):
            driver.engine.extend(name, token_ids=later, complete=complete)
        else:
            driver.engine.extend(name, to_host(later), complete=complete)

    for index in range(len(LENGTHS)):
        inputs, later = inputs_of(driver, stage, index)
        temperature = 0.9 if index == len(LENGTHS) - 1 else 0.0
        driver.start(f"r{index}", inputs, max_tokens=16, temperature=temperature, seed=5)
        driver.step()
        if later is not None:
            follow(f"r{index}", later[:7], complete=False)
            driver.step()
            follow(f"r{index}", later[7:], complete=True)
    names = [f"r{index}" for index in range(len(LENGTHS))]
    if stage == "thinker":
        names.append("media")
        driver.start("media", media_prompt(checkpoint), max_tokens=16, temperature=0.0)
    driver.start("gone", inputs_of(driver, stage, 0)[0], max_tokens=16, temperature=0.0)
    driver.step()
    driver.engine.abort("gone")
    driver.run()
    rows = [
        [
            float(to_torch(tensor).float().abs().sum())
            for event in driver.events[name]
            for tensor in getattr(event, "tensors", {}).values()
        ]
        for name in names
    ]
    return {
        "tokens": [driver.tokens(name) for name in names],
        "rows": [sum(part) for part in rows],
        "left": driver.engine.counts(),
        "workers": [child.pid for child in psutil.Process().children(recursive=True)],
    }


def main(checkpoint: str, stage: str, spread: str) -> None:
    if os.environ.get(START) == "fork":
        multiproc_executor.get_mp_context = functools.partial(multiprocessing.get_context, "fork")
    driver = Driver(make_engine(Path(checkpoint), stage, asynchronous=True, **json.loads(spread)))
    print(json.dumps(answer(driver, checkpoint, stage)), flush=True)
    sys.stdin.read()
    driver.engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
