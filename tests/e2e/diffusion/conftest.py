"""Vocoders of the tiny checkpoint; each is started once."""

from __future__ import annotations

import contextlib

import pytest

from omni_actors.engine.diffusion import DiffusionEngine
from tests.support.code2wav import arguments, run_dry


@pytest.fixture(scope="session")
def vocoders(tiny_checkpoint):
    """Returns the engine, asynchronous or not, that decodes in the way that is given, with further options."""
    engines = {}

    def vocoder(asynchronous, decode, **options):
        key = (asynchronous, str(decode), *sorted(options.items()))
        if key not in engines:
            made = arguments(tiny_checkpoint, asynchronous=asynchronous, decode=decode, **options)
            engines[key] = DiffusionEngine(made)
            stack.callback(engines[key].shutdown)
        return engines[key]

    with contextlib.ExitStack() as stack:
        yield vocoder


@pytest.fixture
def engine(asynchronous, request, vocoders):
    """Decodes as DECODE of the test's module says; idle before and after each test."""
    engine = vocoders(asynchronous, request.module.DECODE)
    yield engine
    run_dry(engine)
    assert set(engine.counts().values()) == {0}, engine.counts()
