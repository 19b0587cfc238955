"""A slow stage or client sets the pace back to admission, and nothing piles up. Large rows go through the arena."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pytest

from omni_actors.client import AsyncOmniClient
from omni_actors.errors import DeadlineExceeded, OmniError, Overloaded, StageLost
from omni_actors.protocol.client import Submit
from omni_actors.protocol.codec import encode
from omni_actors.protocol.common import Failed
from omni_actors.protocol.fields import pack_token_ids
from omni_actors.protocol.header import Header
from omni_actors.protocol.payloads import Prompt
from omni_actors.transport.sockets import Sockets, try_send
from tests.support.answers import assert_echo, collect
from tests.support.builders import flow_chain
from tests.support.launcher import EchoLauncher
from tests.support.nightly import nightly
from tests.support.processes import processes_of, shared_memory_of
from tests.support.waiting import eventually, until

Launch = Callable[..., EchoLauncher]


SMALL = {"edge_messages": 32, "outbox_messages": 16, "backlog_requests": 4}


async def offer(echo: EchoLauncher, count: int, pause: float) -> tuple[list[Any], dict[str, int]]:
    """Requests one after the other; their answers, and the most that each stage was seen to hold."""
    most: dict[str, int] = {}
    async with AsyncOmniClient(echo.endpoint) as client:
        tasks = []
        for number in range(count):
            tasks.append(asyncio.create_task(client.generate(f"{number:04d}" * 2, timeout=100)))
            await asyncio.sleep(pause)
            if number % 10 == 0:
                for stage in (await client.describe()).stages:
                    for name, value in stage.counts.items():
                        key = f"{stage.stage} {name}"
                        most[key] = max(most.get(key, 0), value)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    return answers, most


async def test_slow_last_stage_throttles_the_others_and_then_admission(launch: Launch) -> None:
    data = flow_chain(SMALL, code2wav={"step_seconds": 0.05})
    data["coordinator"]["max_queued"] = 8
    echo = launch(data).wait_ready()
    answers, most = await offer(echo, 120, 0.005)
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    good = [answer for answer in answers if not isinstance(answer, OmniError)]
    assert len(refused) + len(good) == 120
    assert good
    assert len(refused) > 20, most
    assert all(error.retry_after and error.stage for error in refused)
    for answer in good:
        assert_echo(answer, answer.text)
    # One step of a stage makes one message per request that it computes, of those that it holds: of eight in all.
    assert most["talker outbox"] <= 16 + most["talker requests"], most
    assert most["thinker outbox"] <= 16 + 2 * most["thinker requests"], most
    echo.wait_idle()


@pytest.mark.nightly
async def test_the_same_load_is_no_overload_for_fast_stages(launch: Launch) -> None:
    echo = launch(flow_chain({})).wait_ready()
    answers, _ = await offer(echo, 120, 0.005)
    assert not [answer for answer in answers if isinstance(answer, OmniError)]
    echo.wait_idle()


def submit_frames(request_id: str, tokens: int) -> list:
    body = Submit(prompt=Prompt(token_ids=pack_token_ids([120] * tokens)), modalities=("text", "audio"))
    return encode(Header("", request_id), body)


@pytest.mark.parametrize(
    "flow",
    [
        nightly({"client_messages": 50, "client_window_messages": 256}),
        {"client_bytes": 60_000, "client_window_bytes": 1 << 20},
        nightly({"client_stall_seconds": 1.0, "client_window_messages": 256}),
    ],
    ids=["messages", "bytes", "time"],
)
async def test_only_the_slow_client_is_ended(launch: Launch, flow: dict[str, Any]) -> None:
    step = {"step_seconds": 0.005}
    echo = launch(flow_chain(flow, thinker=step, code2wav=step)).wait_ready()
    sockets = Sockets()
    try:
        slow = sockets.dealer(echo.endpoint, b"slow")[0]
        for number in range(5):
            try_send(slow, submit_frames(f"slow {number}", 700))
        async with AsyncOmniClient(echo.endpoint) as good:
            running = [asyncio.create_task(good.generate("x" * 100)) for _ in range(3)]

            async def dropped() -> bool:
                return "dropped_client_slow" in (await good.describe()).counts

            await eventually(dropped, 10, "the slow client is dropped")
            for answer in await asyncio.gather(*running):
                assert_echo(answer, "x" * 100)
        echo.wait_idle()
        ends = [envelope for envelope in collect(slow, [], 5) if isinstance(envelope.body, Failed)]
        assert {envelope.header.request_id for envelope in ends} == {f"slow {number}" for number in range(5)}
        assert {(e.body.code.value, e.body.retryable) for e in ends} == {("slow_client", True)}
        try_send(slow, submit_frames("again", 3))
        assert "x" in "".join(getattr(envelope.body, "text", "") for envelope in collect(slow, [], 1)), "served again"
    finally:
        sockets.context.destroy(linger=0)


@pytest.mark.nightly
async def test_memory_stays_flat_while_clients_do_not_read(launch: Launch) -> None:
    """Each of them asks for 40 MB of audio; more of them, and longer, in benchmarks/slow_client.py."""
    flow = {"client_window_bytes": 1 << 20, "client_bytes": 1 << 20}
    echo = launch(flow_chain(flow, code2wav={"samples_per_token": 10_000})).wait_ready()
    launcher = psutil.Process(echo.process.pid)
    sockets = Sockets()
    try:
        before = launcher.memory_info().rss
        most = before
        for round_ in range(5):
            slow = sockets.dealer(echo.endpoint, b"slow %d" % round_)[0]
            try_send(slow, submit_frames(f"big {round_}", 1000))
            until(lambda n=round_: echo.describe().counts.get("dropped_client_slow") == n + 1, 20, "ended")
            most = max(most, launcher.memory_info().rss)
        assert most - before < 40 << 20, (before, most)
    finally:
        sockets.context.destroy(linger=0)


WIDE = {"row_width": 100_000}  # 200 kB a row


async def test_large_rows_go_by_the_arena_and_all_of_it_is_freed(launch: Launch) -> None:
    echo = launch(flow_chain({}, prompt=WIDE, thinker=WIDE, talker=WIDE)).wait_ready()
    async with AsyncOmniClient(echo.endpoint) as client:
        for _ in range(4):
            tasks = [asyncio.create_task(client.generate(f"{i} hello" * 3, timeout=30)) for i in range(8)]
            streams = [await client.submit("y" * 100) for _ in range(4)]
            await asyncio.sleep(0.05)
            for stream in streams:
                await stream.abort()
            for number, task in enumerate(tasks):
                assert_echo(await task, f"{number} hello" * 3)
    echo.wait_idle()
    blocks = {stage.stage: stage.counts.get("total_blocks", 0) for stage in echo.describe().stages}
    assert blocks["thinker"] > 100, blocks  # the first ones go as frames, until the talker has said that it reads
    assert not shared_memory_of(processes_of(echo.folder)), "nothing has a name in /dev/shm"


@pytest.mark.nightly
async def test_a_killed_stage_in_the_middle_leaves_no_wrong_row_and_no_block(launch: Launch) -> None:
    echo = launch(flow_chain({}, thinker={**WIDE, "step_seconds": 0.002}, talker=WIDE)).wait_ready()
    async with AsyncOmniClient(echo.endpoint) as client:
        await client.generate("the stages say that they read the arenas")
        tasks = [asyncio.create_task(client.generate(f"{i} hello" * 9, timeout=60)) for i in range(16)]
        await asyncio.sleep(0.15)
        psutil.Process(echo.pid_of("talker")).kill()
        for number, task in enumerate(tasks):
            assert_echo(await task, f"{number} hello" * 9)
        assert_echo(await client.generate("the end"), "the end")
    echo.wait_idle()

    def blocks() -> list[int]:
        counts = {stage.stage: stage.counts for stage in echo.describe().stages}
        return [counts[stage]["arena_blocks"] for stage in ("thinker", "talker")]

    until(lambda: blocks() == [0, 0], what=lambda: f"the end of {blocks()}")  # reported with the next heartbeat


@pytest.mark.nightly
async def test_small_arena_falls_back_to_frames(launch: Launch) -> None:
    echo = launch(flow_chain({"arena_bytes": 1 << 20}, prompt=WIDE, thinker=WIDE, talker=WIDE)).wait_ready()
    async with AsyncOmniClient(echo.endpoint) as client:
        for answer in await asyncio.gather(*(client.generate("hello" * 8, timeout=60) for _ in range(16))):
            assert_echo(answer, "hello" * 8)
    echo.wait_idle()
    counts = [stage.counts for stage in echo.describe().stages]
    assert any(count.get("dropped_arena_full") for count in counts)


@pytest.mark.parametrize("policy", ["fail", nightly("replay")])
async def test_killed_consumer_gives_its_blocks_back(launch: Launch, policy: str) -> None:
    wide = flow_chain({}, thinker={**WIDE, "step_seconds": 0.02})
    wide["stages"][2]["on_replica_loss"] = policy
    echo = launch(wide).wait_ready()
    async with AsyncOmniClient(echo.endpoint) as client:
        await client.generate("the talker says that it reads the arena")
        tasks = [asyncio.create_task(client.generate("x" * 400, timeout=60)) for _ in range(4)]
        talker = echo.pid_of("talker")
        psutil.Process(talker).suspend()  # blocks pile up

        def blocks() -> int:
            return {stage.stage: stage.counts.get("arena_blocks", 0) for stage in echo.describe().stages}["thinker"]

        await asyncio.to_thread(until, lambda: blocks() > 3, 10, "blocks")
        psutil.Process(talker).kill()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        if policy == "fail":
            assert all(isinstance(answer, StageLost) for answer in answers)
        else:
            for answer in answers:
                assert_echo(answer, "x" * 400)
        assert (await client.generate("text", modalities=["text"])).text == "text"
    echo.wait_idle()
    thinker = next(stage for stage in echo.describe().stages if stage.stage == "thinker")
    assert thinker.counts["arena_blocks"] == 0


@pytest.mark.nightly
async def test_wedged_stage_ends_requests_by_their_deadline_and_serves_again_afterwards(launch: Launch) -> None:
    """A stage that is stopped takes nothing; what does not need it goes on."""
    echo = launch(flow_chain({}, thinker={"step_seconds": 0.005})).wait_ready()
    talker = echo.pid_of("talker")
    async with AsyncOmniClient(echo.endpoint) as client:
        psutil.Process(talker).suspend()
        try:
            wedged = [asyncio.create_task(client.generate("x" * 20, timeout=1.0)) for _ in range(5)]
            assert (await client.generate("text", modalities=["text"])).text == "text"
            answers = await asyncio.gather(*wedged, return_exceptions=True)
            assert {type(answer) for answer in answers} == {DeadlineExceeded}, "while the stage still stands"
        finally:
            psutil.Process(talker).resume()
        assert_echo(await client.generate("again"), "again")
    echo.wait_idle()


@pytest.mark.nightly
async def test_wedged_stage_holds_up_its_source_and_not_for_ever(launch: Launch) -> None:
    """The thinker makes no more than what may wait for the talker, and goes on when the talker does."""
    small = {"edge_messages": 8, "outbox_messages": 8}
    echo = launch(flow_chain(small, thinker={"step_seconds": 0.001})).wait_ready()
    talker = echo.pid_of("talker")
    async with AsyncOmniClient(echo.endpoint) as client:
        psutil.Process(talker).suspend()
        running = asyncio.create_task(client.generate("y" * 200, timeout=20))

        async def thinker() -> Mapping[str, int]:
            return next(stage.counts for stage in (await client.describe()).stages if stage.stage == "thinker")

        async def is_full() -> bool:
            return (await thinker()).get("outbox") == 9  # one step makes a text and a chunk

        await eventually(is_full, 10, "the thinker's outbox is full")
        for _ in range(10):  # and makes no more
            await asyncio.sleep(0.05)
            counts = await thinker()
            assert counts["outbox"] == 9
            assert counts["engine_requests"] == 1
        psutil.Process(talker).resume()
        assert_echo(await running, "y" * 200)
    echo.wait_idle()


@pytest.mark.nightly
async def test_two_pipelines_on_one_machine_keep_apart(launch: Launch) -> None:
    one, two = launch(flow_chain({}, prompt=WIDE, thinker=WIDE)), launch(flow_chain({}, prompt=WIDE, thinker=WIDE))
    one.wait_ready()
    two.wait_ready()
    assert one.endpoint != two.endpoint
    async with AsyncOmniClient(one.endpoint) as first, AsyncOmniClient(two.endpoint) as second:
        answers = await asyncio.gather(
            *(
                client.generate(text, request_id=f"r{number}")  # the same ids in both
                for number in range(5)
                for client, text in ((first, "one"), (second, "two"))
            )
        )
    for answer, text in zip(answers, ["one", "two"] * 5, strict=True):
        assert_echo(answer, text)
    assert one.end() == 0
    assert two.describe().healthy
