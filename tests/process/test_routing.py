"""The turns of a conversation go to the replica that has its prefix, and elsewhere once that is gone."""

from __future__ import annotations

import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.protocol.messages import StageStatus
from tests.support.load import replicas
from tests.support.waiting import eventually


async def replica_of(client: AsyncOmniClient, messages: list[dict[str, str]]) -> str:
    """Ask, add the answer to the conversation, and return the thinker that made it."""
    output = await client.generate(messages, timeout=30)
    messages.append({"role": "assistant", "content": output.text})
    messages.append({"role": "user", "content": "go on"})
    timeline = await client.timeline(output.request_id)
    (stage,) = timeline.stages
    return f"{stage.stage}/{stage.replica}"


@pytest.mark.nightly
async def test_turns_stay_with_their_replica_until_it_is_killed(launch):
    thinker = {"name": "thinker", "kind": "echo", "outputs": ["text"], "replicas": 2, "restarts": 0}
    coordinator = {"heartbeat_interval": 0.1}
    launcher = launch({"name": "turns", "model": "echo", "stages": [thinker], "coordinator": coordinator}).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client:
        first, second = ([{"role": "user", "content": f"talk {number}"}] for number in range(2))
        assert await replica_of(client, first) == "thinker/0"
        long = await client.submit([*first, {"role": "user", "content": "x" * 4000}])  # keeps thinker/0 busy
        assert await replica_of(client, second) == "thinker/1", "nothing is known of it"
        await long.abort()
        for _ in range(2):
            assert await replica_of(client, second) == "thinker/1", "although thinker/0 has as little to do"
            assert await replica_of(client, first) == "thinker/0"

        async def dead() -> StageStatus | None:
            status = (await replicas(client))["thinker/1"]
            return status if status.state == "dead" else None

        psutil.Process((await replicas(client))["thinker/1"].pid).kill()
        await eventually(dead, 10, "the loss of thinker/1")
        for _ in range(2):
            assert await replica_of(client, second) == "thinker/0"
        assert (await client.describe()).counts["routed_prefix"] >= 4
