"""One replica over two hosts: it starts late, loses a process, loses the link, and leaves nothing on either host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import OmniError
from omni_actors.transport.curve import make_cluster
from tests.support.builders import chain
from tests.support.cluster import Cluster, process_on
from tests.support.load import ask_and_check, replicas, text_of
from tests.support.network import Network
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.nightly

SHORT = {"heartbeat_interval": 0.2, "heartbeat_timeout": 2.0}


async def answers_again(client: AsyncOmniClient, number: int) -> bool:
    with contextlib.suppress(OmniError):
        await ask_and_check(client, text_of(number))
        return True
    return False


async def test_a_spread_replica_ends_as_a_whole_and_comes_back_as_one(
    cluster: Callable[[Any], Cluster], network: Network, short_path: Path
) -> None:
    make_cluster(short_path / "keys")
    data = {**chain(), "coordinator": SHORT, "cluster": {"allow_unencrypted_ranks": True}}
    data["stages"][2]["nodes"] = [1, 0]
    pipeline = cluster(data)
    pipeline.start(0, short_path / "keys")
    until(lambda: "talker/0 (waiting for node 1, 0)" in pipeline.output(0), 30, pipeline.outputs)
    pipeline.start(1, short_path / "keys")  # late
    pipeline.wait_ready()
    async with AsyncOmniClient(pipeline.endpoint) as client:
        await ask_and_check(client, text_of(1))
        before = {rank: process_on(short_path, rank, "talker") for rank in (0, 1)}

        # The process on the further host is killed in the middle of the work: the requests run again, and all is new.
        asking = [asyncio.create_task(ask_and_check(client, text_of(number))) for number in range(10)]
        psutil.Process(before[0]).kill()
        await asyncio.gather(*asking)
        until(lambda: "its ranks on node 0: killed by signal 9" in pipeline.output(0), 10, pipeline.outputs)
        await eventually(lambda: answers_again(client, 2), 15, pipeline.outputs)
        after = {rank: process_on(short_path, rank, "talker") for rank in (0, 1)}
        assert not {*before.values()} & {*after.values()}

        # The link is cut for longer than a host may be silent: what has lost its other part does not go on.
        network.cable.is_cut = True
        until(lambda: "node 1 is away" in pipeline.output(0), 15, pipeline.outputs)
        until(lambda: not psutil.pid_exists(after[0]), 10, pipeline.outputs)
        network.heal()
        await eventually(lambda: answers_again(client, 3), 30, pipeline.outputs)
        last = {rank: process_on(short_path, rank, "talker") for rank in (0, 1)}
        assert not {*after.values()} & {*last.values()}
        assert (await replicas(client))["talker/0"].pid == last[1]
