"""Thinker and talker when something goes wrong: aborts, failing steps, bad input, wrong arguments; who goes first."""

from __future__ import annotations

import pytest
import torch

from omni_actors.engine.arguments import OmniEngineArgs, OmniModelConfig
from omni_actors.engine.rows import to_host
from omni_actors.errors import EngineError, InvalidPayload, InvalidRequest, OmniError, PromptTooLong, UnknownVoice
from omni_actors.protocol.fields import DType, HostTensor
from omni_actors.stage.engine_interface import StageInputs
from omni_actors.telemetry import metrics as table
from tests.support.code2wav import assert_out_of_memory, out_of_memory
from tests.support.stage_driver import SMALL, prompt_length, talker_inputs, token_inputs
from tools.checkpoints.omni import QWEN2_5_OMNI

WIDTH = QWEN2_5_OMNI.tiny_sizes()["width"]  # of rows

pytestmark = pytest.mark.e2e


@pytest.fixture(params=["thinker", "talker"])
def stage(request, thinker, talker, answers):
    """A thinker or a talker, with the inputs of a request and its tokens."""
    stage, answer = talker if request.param == "talker" else thinker, answers[0]
    if stage is thinker:
        stage.inputs, stage.wanted = token_inputs(answer.prompt_token_ids), answer.thinker_tokens
    else:
        stage.inputs, stage.wanted = talker_inputs(answer.thinker_rows, prompt_length(answer)), answer.codec_tokens
    return stage


def test_abort_leaves_nothing(talker, answers):
    answer = answers[0]
    rows, length = answer.thinker_rows, prompt_length(answer)
    for number in range(5):
        inputs = talker_inputs(rows, length, replies=None if number % 2 else 1)
        talker.start(f"r{number}", inputs, max_tokens=64, temperature=0.0)
    for _ in range(4):
        talker.step()
    for name in ("r0", "r1", "r2", "unknown", "r1"):
        talker.engine.abort(name)
    talker.start("late", talker_inputs(rows, length, replies=0), max_tokens=64)
    talker.engine.abort("late")  # before its first step
    talker.engine.extend("r0", to_host(rows[:1]), complete=True)  # rows that were on their way
    talker.engine.abort("r4")
    talker.run()
    assert talker.tokens("r3") == answer.codec_tokens
    assert not any("late" in name for name in talker.events)


def test_warm_up_runs_whole_batches_and_leaves_nothing(stage, monkeypatch):
    engine, steps, prompts = stage.engine, [], []
    worker, original = engine.core.worker, engine.core.step
    run = worker.model_runner.execute_model

    def step():
        steps.append(len(engine.core.scheduler.running))
        return original()

    def execute(scheduled, *args, **options):
        if options.get("dummy_run"):
            prompts.append(scheduled.total_num_scheduled_tokens)
        return run(scheduled, *args, **options)

    monkeypatch.setattr(worker.model_runner, "execute_model", execute)
    monkeypatch.setattr(worker, "omni_prompt_sizes", lambda: [33, 48])  # on a CPU nothing is compiled
    monkeypatch.setattr(engine.core, "step", step)
    monkeypatch.setattr("omni_actors.engine.autoregressive.WARM_UP_LENGTH", 200)  # more than a block of the KV cache
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    before, free = engine.statistics(), pool.get_num_free_blocks()
    engine.warm_up([1, 3])
    assert max(steps) == 3
    assert 1 in steps
    assert prompts == [33, 48]
    assert not any(engine.counts().values())
    assert pool.get_num_free_blocks() == free
    assert not len(pool.cached_block_hash_to_block)
    counted = dict.fromkeys((table.VLLM_QUERIES, table.VLLM_HITS, table.VLLM_PREEMPTIONS), 0)
    assert engine.statistics() == {**before, **counted}
    assert engine.take_scheduled() == []
    cache = [layer.clone() for layer in worker.model_runner.kv_caches]
    for size in (33, 48):
        worker.omni_run_prompts(size)
        assert all(map(torch.equal, worker.model_runner.kv_caches, cache))


def test_a_warm_up_that_takes_too_long_leaves_the_rest_to_requests(talker, monkeypatch, caplog):
    worker, run = talker.engine.core.worker, []
    monkeypatch.setattr(worker, "omni_prompt_sizes", lambda: [33, 48, 65])
    monkeypatch.setattr(worker, "omni_run_prompts", run.append)
    moments = iter([0.0, 1.0, 6.0, 21.0, 22.0])
    monkeypatch.setattr("omni_actors.engine.core.STEADY", lambda: next(moments))
    with caplog.at_level("INFO", "omni_actors"):
        talker.engine.core.compile_prompt_kernels(20.0)
    assert run == [33, 48]
    assert "prompts of [65] tokens" in caplog.text
    assert "prompts of [33, 48] tokens in 22.0 s" in caplog.text


def test_a_model_that_cannot_run_fails_its_start(talker, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel for this device")

    with monkeypatch.context() as patch:
        patch.setattr(talker.engine.core.worker.model_runner, "execute_model", fail)
        with pytest.raises(EngineError, match="no kernel for this device"):
            talker.engine.warm_up([1])
    talker.run()
    assert not any(talker.engine.counts().values())


@pytest.mark.parametrize(("stage", "memory"), [("thinker", "enough"), ("talker", "out of")], indirect=["stage"])
def test_a_failing_step_ends_its_requests_and_no_others(stage, memory):
    calls = 0

    def fail_once(_module, _arguments):
        nonlocal calls
        calls += 1
        if calls == 4:
            if memory == "out of":
                out_of_memory()
            raise RuntimeError("the model is unwell")

    hook = stage.engine.core.worker.model_runner.model.register_forward_pre_hook(fail_once)
    names = [f"r{number}" for number in range(20)]  # more than fit: four wait and must survive
    try:
        for name in names:
            stage.start(name, stage.inputs, max_tokens=8, temperature=0.0)
        stage.run()
    finally:
        hook.remove()
    for name in names[:16]:
        if memory == "enough":
            assert "the model is unwell" in str(stage.error(name))
        else:
            assert_out_of_memory(stage.error(name))
    stage.start("after", stage.inputs, max_tokens=8, temperature=0.0)
    stage.run()
    for name in (*names[16:], "after"):
        assert stage.tokens(name) == stage.wanted[:8]


@pytest.mark.parametrize(
    ("error", "inputs", "params"),
    [
        (InvalidRequest, StageInputs(), {}),
        (PromptTooLong, token_inputs([1] * 512), {}),
        (InvalidPayload, token_inputs([1, 512]), {}),
        (InvalidPayload, token_inputs([-1]), {}),
        (InvalidRequest, token_inputs([1]), {"stop_token_ids": (512,)}),
        (InvalidRequest, token_inputs([1]), {"max_tokens": 2, "min_tokens": 3}),
        (InvalidRequest, token_inputs([1]), {"num_steps": 3}),
        (InvalidRequest, token_inputs([1]), {"temperature": 50.0}),
    ],
)
def test_bad_thinker_requests(thinker, error, inputs, params):
    with pytest.raises(error):
        thinker.start("bad", inputs, **params)
    with pytest.raises(OmniError):
        thinker.engine.adapter.read_rows(HostTensor(DType.F32, (1, WIDTH), bytes(4 * WIDTH)))


def tensor(*shape, dtype=torch.float32):
    return to_host(torch.zeros(shape, dtype=dtype))


ROWS = {"prompt_rows": tensor(3, WIDTH)}


@pytest.mark.parametrize(
    ("error", "tensors", "options"),
    [
        (InvalidPayload, {}, {}),
        (InvalidPayload, {"prompt_rows": tensor(1, WIDTH)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, WIDTH - 1)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, 1, WIDTH)}, {}),
        (InvalidPayload, {"prompt_rows": tensor(3, WIDTH, dtype=torch.int32)}, {}),
        (InvalidPayload, {"prompt_rows": HostTensor(DType.F32, (3, WIDTH), bytes(3 * WIDTH * 4 - 1))}, {}),
        (InvalidPayload, {**ROWS, "reply_rows": tensor(WIDTH)}, {}),
        (InvalidPayload, {**ROWS, "mrope_positions": tensor(3, 2)}, {}),
        (InvalidPayload, {**ROWS, "mrope_positions": tensor(3, 3, dtype=torch.int64)}, {}),
        (InvalidPayload, {**ROWS, "mrope_positions": to_host(torch.full((3, 2), -1))}, {}),
        (InvalidPayload, {**ROWS, "mrope_positions": to_host(torch.full((3, 2), 2**40))}, {}),
        (InvalidPayload, {**ROWS, "extra": tensor(1, WIDTH)}, {}),
        (PromptTooLong, {"prompt_rows": tensor(511, WIDTH)}, {}),
        (UnknownVoice, ROWS, {"voice": "Nobody"}),
    ],
)
def test_bad_talker_requests(talker, error, tensors, options):
    with pytest.raises(error) as caught:
        talker.start("bad", StageInputs(tensors=tensors), **options)
    if error is UnknownVoice:
        assert all(voice in str(caught.value) for voice in ("Chelsie", "Ethan"))


def test_bad_rows_end_their_request_alone(talker, answers):
    answer = answers[0]
    length = prompt_length(answer)
    inputs = talker_inputs(answer.thinker_rows, length, replies=1)
    for name in ("wide", "late", "good"):
        talker.start(name, inputs, max_tokens=16, temperature=0.0)
    with pytest.raises(InvalidRequest, match="already running"):
        talker.start("good", inputs)
    talker.run()
    with pytest.raises(InvalidPayload):
        talker.engine.extend("wide", tensor(1, WIDTH // 2), complete=False)
    talker.engine.extend("late", None, complete=True)
    with pytest.raises(InvalidRequest):
        talker.engine.extend("late", to_host(answer.thinker_rows[:1]), complete=False)
    talker.engine.extend("good", to_host(answer.thinker_rows[length + 2 :]), complete=True)
    talker.run()
    assert talker.tokens("good") == answer.codec_tokens[:16]


def test_an_urgent_request_overtakes_in_a_full_stage(stage):
    """An engine without a place takes up two ordinary requests and then an urgent one."""
    places = stage.engine.core.vllm_config.scheduler_config.max_num_seqs
    stage.engine.take_scheduled()
    for number in range(places):
        stage.start(f"running{number}", stage.inputs, max_tokens=6, temperature=0.0, ignore_eos=True)
    while stage.engine.statistics()[table.VLLM_RUNNING] < places:  # not all prompts fit into one step
        stage.step()
    for name, priority in (("first", 0), ("second", 0), ("urgent", -1)):
        stage.start(name, stage.inputs, max_tokens=1, temperature=0.0, priority=priority)
    stage.run()
    assert [name for name, _ in stage.engine.take_scheduled()][places:] == ["urgent", "first", "second"]


@pytest.mark.parametrize("name", ["thinker", "talker", "code2wav"])
def test_every_stage_takes_requests_by_priority_unless_the_yaml_says_otherwise(tiny_checkpoint, name):
    kind, usual = ("diffusion", {}) if name == "code2wav" else ("autoregressive", SMALL)
    model = OmniModelConfig(str(tiny_checkpoint), name)
    for policy, given in (("priority", {}), ("fcfs", {"scheduling_policy": "fcfs"})):
        config = OmniEngineArgs(model, kind, {**usual, **given}).create_engine_config()
        assert config.scheduler_config.policy == policy
