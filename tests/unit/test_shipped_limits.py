"""128 answers at a time need no flag: no limit on their way, as shipped, is lower."""

from __future__ import annotations

import itertools

from omni_actors import config
from omni_actors.config import PipelineConfig
from omni_actors.sharing import FairQueue, Tenant, Ticket
from tests.support.paths import REPOSITORY

ANSWERS = 128


def shipped() -> PipelineConfig:
    return config.load(REPOSITORY / "stage_configs" / "qwen2_5_omni.yaml", {}, devices=1).pipeline


def granted(count: int, tenant: str) -> int:
    """How many of so many slots one client gets that is alone, for one of its tenants."""
    numbers = itertools.count()
    slots = FairQueue(count, 10 * count, 10 * count, lambda stages: False)
    for _ in range(2 * count):
        slots.enter(Ticket(str(next(numbers)), b"http", Tenant(b"http", tenant), 0, 1, ()))
    return len(list(iter(slots.next, None)))


def test_one_client_behind_one_address_has_128_answers_at_a_time() -> None:
    """All requests over HTTP are those of one client, and all from one address those of one tenant."""
    pipeline = shipped()
    assert granted(pipeline.coordinator.max_in_flight, "address") >= ANSWERS
    assert pipeline.http.connections >= ANSWERS
    assert pipeline.flow.backlog_requests >= ANSWERS


def test_no_text_waits_for_the_end_of_another_one() -> None:
    assert shipped().stage("thinker").engine["max_num_seqs"] >= ANSWERS
