"""Engines of the tiny checkpoint, and what transformers answers with it."""

from __future__ import annotations

import pytest

from tests.support.reference import Reference, ReferenceResult
from tests.support.stage_driver import VOICES, Driver, make_engine

PROMPTS = ("hello", "What is the capital of France?", "Tell me a story about a dog and a cat who sail the sea. " * 3)


@pytest.fixture(scope="session")
def answers(reference: Reference) -> list[ReferenceResult]:
    """One answer per prompt, the voices in turn."""
    return [
        reference.generate(
            reference.inputs([{"role": "user", "content": prompt}]), voice=VOICES[index % 2], speaks=False
        )
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def thinker(request, tiny_checkpoint):
    mode = request.param if hasattr(request, "param") else None
    engine = make_engine(tiny_checkpoint, "thinker", asynchronous=mode)
    yield Driver(engine)
    engine.shutdown()


@pytest.fixture(scope="module")
def talker(request, tiny_checkpoint):
    mode = request.param if hasattr(request, "param") else None
    engine = make_engine(tiny_checkpoint, "talker", asynchronous=mode)
    yield Driver(engine)
    engine.shutdown()


@pytest.fixture(autouse=True)
def clean(request):
    """Every test finds its engines idle and leaves them idle."""
    drivers = [request.getfixturevalue(name) for name in ("thinker", "talker") if name in request.fixturenames]
    for driver in drivers:
        driver.clear()
    yield
    for driver in drivers:
        driver.assert_idle()
