"""A stage on two workers: `python -m tests.e2e.tensor_parallel CHECKPOINT STAGE` prints its answers, a line of JSON.

A process of its own, because vLLM starts its workers by spawning: they import this file first and with it what makes
vLLM run here. When it has said what it has to say it keeps its workers until its input closes.
"""

from __future__ import annotations

import json
import sys

from omni_actors.engine.platform import prepare

prepare()

import psutil  # noqa: E402
import torch  # noqa: E402

from omni_actors.engine.tensors import to_host, to_torch  # noqa: E402
from omni_actors.stage.interface import StageInputs  # noqa: E402
from tests.e2e.stage_driver import Driver, make_engine  # noqa: E402

LENGTHS = (5, 33, 90)


def inputs_of(stage: str, index: int) -> tuple[StageInputs, torch.Tensor | None]:
    """Inputs of a request, and the rows that come later."""
    generator = torch.Generator().manual_seed(index)
    length = LENGTHS[index]
    if stage == "thinker":
        return StageInputs(token_ids=torch.randint(3, 200, (length,), generator=generator).tolist()), None
    rows = torch.randn(length + 20, 128, generator=generator)
    tensors = {"prompt_rows": to_host(rows[:length]), "reply_rows": to_host(rows[length : length + 3])}
    return StageInputs(tensors=tensors, complete=False), rows[length + 3 :]


def answer(driver: Driver, stage: str) -> dict[str, object]:
    """Tokens and the sum of the rows of three requests that join one after the other; what is left; who worked."""
    for index in range(len(LENGTHS)):
        inputs, later = inputs_of(stage, index)
        driver.start(f"r{index}", inputs, max_tokens=16, temperature=0.0)
        driver.step()
        if later is not None:
            driver.engine.extend(f"r{index}", to_host(later[:7]), complete=False)
            driver.step()
            driver.engine.extend(f"r{index}", to_host(later[7:]), complete=True)
    driver.start("gone", inputs_of(stage, 0)[0], max_tokens=16, temperature=0.0)
    driver.step()
    driver.engine.abort("gone")
    driver.run()
    names = [f"r{index}" for index in range(len(LENGTHS))]
    rows = [
        [float(to_torch(tensor).float().abs().sum()) for event in driver.events[name]
         for tensor in getattr(event, "tensors", {}).values()]
        for name in names
    ]  # fmt: skip
    return {
        "tokens": [driver.tokens(name) for name in names],
        "rows": [sum(part) for part in rows],
        "left": driver.engine.counts(),
        "workers": [child.pid for child in psutil.Process().children(recursive=True)],
    }


def main(checkpoint: str, stage: str) -> None:
    driver = Driver(make_engine(checkpoint, stage, asynchronous=True, tensor_parallel_size=2))
    print(json.dumps(answer(driver, stage)), flush=True)
    sys.stdin.read()
    driver.engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
