"""vLLM's kernels with numpy, each launch against Triton's interpreter on a copy of all that it is given."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from omni_actors.engine.workers import numpy_kernels
from tests.support.stage_driver import token_inputs

pytestmark = pytest.mark.e2e
WISHES = (
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.2},
    {"temperature": 0.9, "min_p": 0.05, "min_tokens": 5, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.0, "allowed_token_ids": list(range(20, 90)), "repetition_penalty": 1.1},
    {"temperature": 0.7, "bad_words": ["the", "a b"], "logprobs": 3},
)
USED = {
    "_apply_write", "_bad_words", "_bias", "_bincount", "_combine_sampled_and_draft_tokens", "_compute_slot_mappings",
    "_gather_block_tables", "_get_num_sampled_and_rejected", "_min_p", "_penalties", "_post_update",
    "_prepare_pos_seq_lens", "_prepare_prefill_inputs", "_prepare_rope_positions", "_temperature",
    "_topk_log_softmax",
}  # fmt: skip


@pytest.fixture
def compared(monkeypatch):
    """The names of the kernels whose launches have been compared."""
    names, run = set(), numpy_kernels.run

    def both(kernel, *arguments, **options):
        copies = {}

        def copy(given):
            if not isinstance(given, torch.Tensor):
                return given
            memory = given.untyped_storage()
            copied = copies.setdefault(memory.data_ptr(), (given, memory.clone()))[1]
            return given.new_empty(0).set_(copied, given.storage_offset(), given.size(), given.stride())

        numpy_kernels.interpreted(kernel, *map(copy, arguments), **{key: copy(one) for key, one in options.items()})
        run(kernel, *arguments, **options)
        for given, copied in copies.values():
            ours, theirs = (
                torch.empty(0, dtype=given.dtype).set_(memory, 0, (memory.nbytes() // given.itemsize,), (1,))
                for memory in (given.untyped_storage(), copied)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, equal_nan=True, msg=kernel.__name__)
        if numpy_kernels.translated(kernel) is not None:
            names.add(kernel.__name__.removesuffix("_kernel"))

    monkeypatch.setattr(numpy_kernels, "run", both)  # for engines that the test starts
    monkeypatch.setattr(InterpretedFunction, "run", both)
    return names


@pytest.mark.nightly  # whatever is compared with transformers runs these kernels, too
def test_each_kernel_does_what_the_interpreter_does(tight, answers, compared):
    """Prompts in pieces, requests that are preempted, and sampling of all kinds."""
    thinker = tight("thinker")
    for number in range(8):
        inputs = token_inputs(answers[number % 3].prompt_token_ids)
        thinker.start(f"r{number}", inputs, seed=number, max_tokens=40, **WISHES[number % len(WISHES)])
    thinker.run()
    assert all(len(thinker.tokens(f"r{number}")) for number in range(8))
    assert thinker.preempted
    assert compared >= USED, USED - compared


@triton.jit
def summed_up(numbers):
    place = tl.arange(0, 4)
    tl.store(numbers + place, tl.cumsum(place))


def test_a_kernel_that_needs_more_of_the_language_is_left_to_the_interpreter():
    assert numpy_kernels.translated(summed_up) is None
    numbers = torch.zeros(4)
    numpy_kernels.run(summed_up, numbers, grid=(1,), warmup=False)
    assert numbers.tolist() == [0, 1, 3, 6]
