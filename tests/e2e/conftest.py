"""What the tests of real models compare with, and engines in the tests' process, each started once."""

from __future__ import annotations

import contextlib

import pytest
import yaml
from transformers import PreTrainedConfig
from triton.runtime.interpreter import GridExecutor

from tests.support.nightly import nightly
from tests.support.paths import REPOSITORY
from tests.support.qwen3_reference import Qwen3Reference
from tests.support.reference import Reference
from tests.support.servers import HttpPipeline, close_clients
from tests.support.stage_driver import VOICES, Driver, count_preemptions, kv_cache, make_engine
from tests.support.startup.untraced import untraced

# On the CPU, Triton's interpreter runs the kernels of vLLM, which take most of a step.
GridExecutor.__call__ = untraced(GridExecutor.__call__)
# huggingface_hub writes a configuration out, 0.2 s each, for every form of a union that its field does not have: half
# of what an engine takes to start.
PreTrainedConfig.__repr__ = object.__repr__
PROMPTS = ("hello", "What is the capital of France?", "Tell me a story about a dog and a cat who sail the sea. " * 3)
BLOCK = 32  # of the key/value cache, the smallest on a CPU


@pytest.fixture(scope="session", autouse=True)
def engines(tiny_qwen3_checkpoint):
    """Returns the engine of a stage with options, started when it is first asked for.

    The engines of a process share vLLM's groups of ranks, which the first one makes: it has experts, and suits all.
    """
    started = {}

    def engine(checkpoint, stage, **options):
        key = (checkpoint, stage, *sorted(options.items()))
        if key not in started:
            started[key] = make_engine(checkpoint, stage, **options)
            stack.callback(started[key].shutdown)
        return started[key]

    with contextlib.ExitStack() as stack:
        engine(tiny_qwen3_checkpoint, "talker", asynchronous=True)
        yield engine


@pytest.fixture
def driver(engines):
    """Returns a driver of such an engine for one test, which finds it idle and leaves it idle."""
    used = []

    def drive(*arguments, **options):
        used.append(Driver(engines(*arguments, **options)))
        used[-1].assert_idle()
        return used[-1]

    yield drive
    for each in used:
        each.assert_idle()


@pytest.fixture(params=[nightly(False), True], ids=["sync", "async"])
def asynchronous(request):
    """How engines schedule. Pipelines on a CPU are synchronous, so the tests of engines leave that to the night."""
    return request.param


@pytest.fixture
def thinker(driver, tiny_checkpoint, asynchronous):
    return driver(tiny_checkpoint, "thinker", asynchronous=asynchronous, block_size=BLOCK)


@pytest.fixture
def talker(driver, tiny_checkpoint, asynchronous):
    return driver(tiny_checkpoint, "talker", asynchronous=asynchronous)


@pytest.fixture
def tight(driver, tiny_checkpoint, asynchronous):
    """Returns the driver of a stage whose KV cache is too small for several requests, with those it preempts.

    Prompts of more than 64 tokens are computed in chunks.
    """

    def drive(stage, checkpoint=tiny_checkpoint, blocks=9, **options):
        small = {"max_model_len": 256, "max_num_batched_tokens": 64, **kv_cache(checkpoint, stage, blocks, BLOCK)}
        made = driver(checkpoint, stage, asynchronous=asynchronous, **small | options)
        made.preempted = watched.enter_context(count_preemptions(made.engine))
        return made

    with contextlib.ExitStack() as watched:
        yield drive


@pytest.fixture(scope="session")
def reference(tiny_checkpoint):
    """transformers with the tiny checkpoint; loaded once, and changed by no test."""
    return Reference(tiny_checkpoint)


@pytest.fixture(scope="session")
def qwen3_reference(tiny_qwen3_checkpoint):
    """transformers with the tiny Qwen3-Omni checkpoint; loaded once, and changed by no test."""
    return Qwen3Reference(tiny_qwen3_checkpoint)


@pytest.fixture(scope="session")
def answers(reference):
    """transformers' answer to each of PROMPTS, the voices in turn."""
    return [
        reference.generate(
            reference.inputs([{"role": "user", "content": prompt}]), voice=VOICES[index % 2], speaks=False
        )
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="session")
def qwen3_http(tiny_qwen3_checkpoint):
    """The tiny Qwen3-Omni pipeline with an HTTP server; few messages may be under way between two of its stages."""
    overrides = {"model": tiny_qwen3_checkpoint, "flow.edge_messages": 2, "flow.outbox_messages": 2}
    with HttpPipeline("stage_configs/tiny_qwen3_omni.yaml", overrides) as running:
        yield running


@pytest.fixture(scope="session")
def qwen3_tts_http(tiny_qwen3_tts):
    """The tiny Qwen3-TTS pipeline, with voices of its own, and an HTTP server."""
    with HttpPipeline("stage_configs/tiny_qwen3_tts.yaml", {"model": tiny_qwen3_tts}) as running:
        yield running


@pytest.fixture(autouse=True)
def clients_are_closed():
    yield
    close_clients()


@pytest.fixture(scope="session")
def tiny_spoken_chat(tiny_llama, tiny_qwen3_tts, tmp_path_factory):
    """The stages of spoken_chat.yaml as they are shipped, with checkpoints and engines for a CPU."""
    shipped = yaml.safe_load((REPOSITORY / "stage_configs" / "spoken_chat.yaml").read_text())
    shipped["model"] = str(tiny_llama)
    engine = {"dtype": "float32", "max_model_len": 1024, "enforce_eager": True, "kv_cache_memory_bytes": 67108864}
    for stage in shipped["stages"]:
        stage |= {"stall_timeout": 60, "devices": None}
        if stage["kind"] == "autoregressive":
            stage |= {"engine": engine, "sampling": {"max_tokens": 48, "temperature": 0.0}}
        if "model" in stage:
            stage["model"] = str(tiny_qwen3_tts)
    config = tmp_path_factory.mktemp("chat") / "spoken_chat.yaml"
    config.write_text(yaml.safe_dump(shipped, sort_keys=False))
    return config
