"""Stages with spares lose a replica in the middle of an answer and never wait for a process to start."""

from __future__ import annotations

import psutil

from omni_actors.client import AsyncOmniClient, Text
from omni_actors.protocol.messages import Operation, StageStatus
from tests.support.launcher import EchoLauncher
from tests.support.load import STAGES, ask_and_check, disturbed_chain, replicas
from tests.support.waiting import until

TEXT = "".join(chr(65 + number % 50) for number in range(40))


async def test_an_answer_goes_on_though_a_replica_of_each_stage_dies_and_none_starts_again(launch):
    """The stages may not restart at all: whatever is heard after a death comes from the spares."""
    data = disturbed_chain(0.02, spares=1, restarts=0)
    data["coordinator"]["max_attempts"] = 2 * len(STAGES)
    launcher = launch(data).wait_ready()
    async with AsyncOmniClient(launcher.endpoint) as client, AsyncOmniClient(launcher.endpoint) as other:
        undisturbed = await client.generate(TEXT, seed=1, modalities=["text", "audio"])
        before = await replicas(other)
        stream = await client.submit(TEXT, seed=1, modalities=["text", "audio"], timeout=60)
        left, letters, samples = list(STAGES), "", []
        async for item in stream:
            if isinstance(item, Text):
                letters += item.text
                continue
            samples.append(item.samples.tobytes())
            if left and len(samples) % 3 == 0:
                psutil.Process(before[f"{left.pop(0)}/0"].pid).kill()
        after = await replicas(other)
        assert not left, "all were killed while the answer was heard"
        assert letters == undisturbed.text
        assert b"".join(samples) == undisturbed.audio.tobytes()
        assert {name for name, status in after.items() if status.state == "dead"} == {f"{stage}/0" for stage in STAGES}
        assert all(after[f"{stage}/1"].pid == before[f"{stage}/1"].pid for stage in STAGES)
        assert (await other.describe()).healthy, "every place is taken"

        # A replica that is back is the spare of the one that replaced it, and shown as such.
        await other.operate(Operation.RESTART, "talker", 0)
        until(lambda: _talker(launcher, 0).state == "ready", 10, "talker/0 is back")
        assert _talker(launcher, 0).spare
        metrics = await other.metrics()
        assert 'omni_replica_ready{replica="1",stage="talker"} 1' in metrics
        assert 'omni_replica_spare{replica="0",stage="talker"} 1' in metrics
        psutil.Process(after["talker/1"].pid).kill()
        await ask_and_check(client, "who speaks now")
        assert not _talker(launcher, 0).spare


def _talker(launcher: EchoLauncher, number: int) -> StageStatus:
    return next(item for item in launcher.describe().stages if (item.stage, item.replica) == ("talker", number))
