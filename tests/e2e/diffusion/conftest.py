"""Vocoders of the tiny checkpoint; each is started once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_actors.engine.diffusion import DiffusionEngine
from tests.support.code2wav import arguments, run_dry
from tests.support.nightly import nightly

Vocoders = Callable[[bool, dict[str, Any]], DiffusionEngine]


@pytest.fixture(scope="session")
def vocoders(tiny_checkpoint: Path) -> Iterator[Vocoders]:
    """Returns the engine, asynchronous or not, that decodes in the way that is given."""
    engines: dict[tuple[bool, str], DiffusionEngine] = {}

    def vocoder(asynchronous: bool, decode: dict[str, Any]) -> DiffusionEngine:
        key = (asynchronous, str(decode))
        if key not in engines:
            engines[key] = DiffusionEngine(arguments(tiny_checkpoint, asynchronous=asynchronous, decode=decode))
            stack.callback(engines[key].shutdown)
        return engines[key]

    with contextlib.ExitStack() as stack:
        yield vocoder


@pytest.fixture(params=[nightly(False), True], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, vocoders: Vocoders) -> Iterator[DiffusionEngine]:
    """Decodes as DECODE of the test's module says; idle before and after each test."""
    engine = vocoders(request.param, request.module.DECODE)
    yield engine
    run_dry(engine)
    assert set(engine.counts().values()) == {0}, engine.counts()
