"""What benchmarks ask: nothing twice, also in different runs against one pipeline."""

from __future__ import annotations

import importlib
from argparse import Namespace

import pytest

from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.nightly


def test_two_runs_ask_different_things_of_equal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    askers = importlib.import_module("askers")
    runs = [askers.Asker(Namespace(text_tokens=8, codec_tokens=0, prompt_repeats=1)) for _ in range(2)]
    prompts = [run.prompt() for run in runs for _ in range(2)]
    assert len(set(prompts)) == len(prompts)
    assert len({len(prompt) for prompt in prompts}) == 1
