"""The budget for embedding rows in a real talker: requests are delayed by it, and none fails or changes."""

from __future__ import annotations

import pytest

from omni_actors.engine.tensors import to_host
from tests.support.stage_driver import BOTH_TALKER_MODES, prompt_length, talker_inputs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@BOTH_TALKER_MODES
@pytest.mark.parametrize("rows_beyond_one_request", [0, -10], ids=["room for one", "too small for one"])
def test_the_budget_delays_requests_and_changes_none(talker, answers, monkeypatch, rows_beyond_one_request):
    answer = answers[0]
    rows, length = answer.thinker_rows, prompt_length(answer)
    # A request starts with the rows of its prompt and its first reply row; two more are room for none.
    budget = talker.engine.core.scheduler.budget
    monkeypatch.setattr(budget, "limit_bytes", (length + 3 + rows_beyond_one_request) * rows[0].nbytes)
    talker.engine.take_scheduled()
    options = {"max_tokens": 24, "temperature": 0.0}
    talker.start("first", talker_inputs(rows, length, replies=0), **options)
    talker.start("second", talker_inputs(rows, length, replies=0), **options)
    talker.start("gone", talker_inputs(rows, length), **options)
    talker.start("urgent", talker_inputs(rows, length), priority=-1, **options)
    talker.run()
    assert [name for name, _ in talker.engine.take_scheduled()] == ["urgent", "first"]
    counts = talker.engine.counts()
    assert counts["waiting_for_budget"] == 2
    assert counts["running"] == 1
    assert talker.engine.over_budget()
    statistics = talker.engine.statistics().budget
    assert statistics.waiting == 2
    assert statistics.held_bytes == counts["row_bytes"]
    assert statistics.deferrals >= 2
    talker.engine.abort("gone")
    late = rows[length + 1 :].split(1)
    for row in late[:10]:  # for both, far beyond the budget
        talker.engine.extend("first", to_host(row), complete=False)
        talker.engine.extend("second", to_host(row), complete=False)
        talker.run()
    assert talker.engine.take_scheduled() == []
    talker.engine.extend("first", to_host(rows[length + 11 :]), complete=True)
    talker.run()
    assert [name for name, _ in talker.engine.take_scheduled()] == ["second"]
    talker.engine.extend("second", to_host(rows[length + 11 :]), complete=True)
    talker.run()
    for name in ("urgent", "first", "second"):
        assert talker.tokens(name) == answer.codec_tokens[:24]
