"""A few seconds of scripts/fuzz_http.py; CONTRIBUTING says when to run it for longer."""

from __future__ import annotations

import pytest

from scripts.fuzz_http import Case, Fuzzer
from tests.support.servers import HttpPipeline

pytestmark = pytest.mark.nightly


def test_malformed_requests_break_nothing(echo: HttpPipeline) -> None:
    fuzzer = Fuzzer(echo, seed=3)
    fuzzer.run(2.5)
    assert fuzzer.statuses[200], "requests that are well-formed are among them"
    assert fuzzer.statuses[400], "and such as are not"


def test_a_case_can_be_repeated() -> None:
    assert [Case(7, number).bytes for number in range(50)] == [Case(7, number).bytes for number in range(50)]
