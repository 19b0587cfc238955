"""Requests through real processes and sockets: answers, their receivers, and the error of each mistake."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from omni_actors.cli.top import scrape
from omni_actors.client import AsyncOmniClient, Audio, OmniClient, Text
from omni_actors.errors import (
    Aborted,
    DeadlineExceeded,
    EngineError,
    InvalidPayload,
    InvalidRequest,
    OmniError,
    PromptTooLong,
    UnknownModality,
    UnknownVoice,
)
from omni_actors.protocol.codec import MAGIC, encode
from omni_actors.protocol.fields import Header, pack_token_ids
from omni_actors.protocol.messages import Abort, Done, Submit
from omni_actors.protocol.payloads import Prompt
from omni_actors.stage.echo import FAIL_TOKEN
from omni_actors.telemetry.metrics import REJECTED
from omni_actors.transport.sockets import try_send
from tests.support.answers import SAMPLES, assert_echo, collect
from tests.support.commands import python
from tests.support.launcher import EchoLauncher
from tests.support.load import STAGES
from tests.support.waiting import PATIENCE, eventually, until


@pytest.mark.parametrize("modalities", [("text", "audio"), ("text",), ("audio",)])
async def test_an_answer_has_the_modalities_that_are_asked_for(echo, modalities):
    async with AsyncOmniClient(echo.endpoint) as client:
        params = {"talker": {"max_tokens": 3}}
        output = await client.generate("hello", modalities=modalities, params=params)
    assert output.text == ("hello" if "text" in modalities else "")
    assert (0 if output.audio is None else len(output.audio)) == (3 * SAMPLES if "audio" in modalities else 0)
    assert set(output.usage) == set(STAGES if "audio" in modalities else STAGES[:2])


async def test_two_hundred_at_once_keep_apart_and_in_order(echo):
    texts = [f"request {i} " + chr(97 + i % 26) * (i % 23) for i in range(200)]
    async with AsyncOmniClient(echo.endpoint) as client:
        outputs = await asyncio.gather(*(client.generate(text, timeout=60) for text in texts))
    for output, text in zip(outputs, texts, strict=True):
        assert_echo(output, text)


async def test_deadline(echo):
    async with AsyncOmniClient(echo.endpoint) as client:
        for text, seconds in (("x" * 4000, 0.3), ("x", -1)):
            with pytest.raises(DeadlineExceeded):
                await client.generate(text, timeout=seconds)
        client.abort("never heard of")


async def test_a_call_that_is_cancelled_ends_its_request(echo):
    async with AsyncOmniClient(echo.endpoint) as client:
        call = asyncio.create_task(client.generate("x" * 4000, modalities=("text",), request_id="cancelled"))
        await asyncio.sleep(0)  # it is sent, and the coordinator reads it before the question
        assert (await client.timeline("cancelled")).outcome == "running"
        call.cancel()
        await asyncio.wait((call,))
        outcome = (await client.timeline("cancelled")).outcome
    assert (call.cancelled(), outcome) == (True, "aborted")


async def test_each_mistake_gets_its_error_and_harms_no_other(echo):
    mistakes: list[tuple[type[OmniError], str, dict]] = [
        (UnknownVoice, "Chelsie, Ethan", {"prompt": "x", "voice": "Bob"}),
        (UnknownModality, "text, audio", {"prompt": "x", "modalities": ["smell"]}),
        (InvalidPayload, "modalities", {"prompt": "x", "modalities": []}),
        (InvalidRequest, "max_token", {"prompt": "x", "params": {"thinker": {"max_token": 3}}}),
        (InvalidRequest, "Did you mean 'thinker'", {"prompt": "x", "params": {"thinkr": {"max_tokens": 3}}}),
        (InvalidRequest, "thinker", {"prompt": "x", "params": {"thinker": 3}}),
        (InvalidRequest, "empty", {"prompt": ""}),
        (InvalidPayload, "empty", {"prompt": {"prompt_token_ids": []}}),
        (InvalidRequest, "empty", {"prompt": [{"role": "user", "content": ""}]}),
        (InvalidRequest, "32-bit", {"prompt": {"prompt_token_ids": [2**40]}}),
        (InvalidRequest, "role", {"prompt": [{"content": "x"}]}),
        (InvalidRequest, "form", {"prompt": [3]}),
        (InvalidRequest, "form", {"prompt": "x", "audios": [3]}),
        (InvalidPayload, "cannot be encoded", {"prompt": "\ud800"}),
        (PromptTooLong, "at most 4096", {"prompt": "x" * 5000}),
        (InvalidPayload, "limit is 100000", {"prompt": "x" * 100_001}),
        (InvalidPayload, "limit", {"prompt": "x", "images": [bytes(1_000_001)]}),
        (EngineError, "asked this request to fail", {"prompt": {"prompt_token_ids": [65, FAIL_TOKEN]}}),
        (InvalidPayload, "seed", {"prompt": "x", "seed": -1}),
    ]
    async with AsyncOmniClient(echo.endpoint) as client:
        good = [asyncio.create_task(client.generate(f"good {i}" * 3)) for i in range(5)]
        answers = await asyncio.gather(
            *(client.generate(**options) for _, _, options in mistakes), return_exceptions=True
        )
        for (kind, word, options), answer in zip(mistakes, answers, strict=True):
            assert type(answer) is kind, (options, answer)
            assert word in str(answer), (options, answer)
            assert answer.hint
            assert kind is not EngineError or answer.stage == "prompt"
        for i, output in enumerate(await asyncio.gather(*good)):
            assert_echo(output, f"good {i}" * 3)


async def test_a_request_id_is_used_once_and_only_by_its_client(echo):
    async with AsyncOmniClient(echo.endpoint) as client, AsyncOmniClient(echo.endpoint) as other:
        stream = await client.submit("x" * 100, request_id="mine")
        with pytest.raises(InvalidRequest, match="in use"):
            await client.submit("y", request_id="mine")
        await eventually(lambda: stream.unread, what="the coordinator has the first")  # they come over two connections
        with pytest.raises(InvalidRequest, match="used before"):
            await other.generate("y", request_id="mine")
        other.abort("mine")
        assert (await stream.result()).text == "x" * 100


def test_the_sync_client_answers_streams_and_aborts(echo):
    with OmniClient(echo.endpoint) as client:
        assert client.describe().modalities == ("text", "audio")
        assert_echo(client.generate("sync"), "sync")
        stream = client.submit("ab")
        items = list(stream)
        assert [item.text for item in items if isinstance(item, Text)] == ["a", "b"]
        assert sum(len(item.samples) for item in items if isinstance(item, Audio)) == 2 * SAMPLES
        assert "code2wav" in stream.usage
        slow = client.submit("x" * 1000)
        slow.abort()
        with pytest.raises(Aborted):
            slow.result()
        pending = client.submit("x" * 1000)
    client.close()
    for use in (client.describe, lambda: client.generate("x"), pending.result):
        with pytest.raises(InvalidRequest, match="closed"):
            use()


def submit_frames(request_id: str, text: str = "hi", **header: object) -> list:
    body = Submit(prompt=Prompt(token_ids=pack_token_ids(list(text.encode()))), modalities=("text",))
    return encode(Header("", request_id, **header), body)


def test_a_client_that_does_not_read_for_a_while_gets_everything(echo, sockets):
    slow = sockets.dealer(echo.endpoint, b"slow")[0]
    requests, length = 20, 250
    for number in range(requests):
        try_send(slow, submit_frames(f"slow {number}", "x" * length))
    # Far more than the queues of both sockets hold.
    until(lambda: echo.describe().in_flight == 0, 20, "all of it computed")
    envelopes = collect(slow, [], requests)
    assert len(envelopes) == requests * (length + 1)
    for number in range(requests):
        mine = [envelope for envelope in envelopes if envelope.header.request_id == f"slow {number}"]
        assert [envelope.header.seq for envelope in mine] == list(range(length + 1))
        assert isinstance(mine[-1].body, Done)


def test_a_client_that_vanishes_takes_its_requests_along(echo, sockets):
    dealer = sockets.dealer(echo.endpoint, b"vanishing")[0]
    try_send(dealer, submit_frames("vanishing", "x" * 150, deadline=time.time() + 600))
    until(lambda: echo.describe().in_flight == 1, 5, "admitted")
    lost = echo.describe().counts.get("dropped_client_lost", 0)
    dealer.close(linger=0)
    until(lambda: echo.describe().in_flight == 0, 5, "ended")
    assert echo.describe().counts["dropped_client_lost"] == lost + 1


async def test_a_client_whose_request_was_lost_gets_an_error(echo, monkeypatch):
    """As if this coordinator had ended it: the request is unknown there, the stream must not wait for ever."""
    monkeypatch.setattr("omni_actors.client.async_client.PING_SECONDS", 0.1)
    async with AsyncOmniClient(echo.endpoint) as client:
        await client.describe()
        with monkeypatch.context() as losing:
            losing.setattr("omni_actors.client.async_client.try_send", lambda socket, frames: True)
            stream = await client.submit("x", modalities=["text"])
        with pytest.raises(OmniError, match="does not know this request") as caught:
            async with asyncio.timeout(5):
                await stream.result()
        assert caught.value.retryable


class Exploit(str):
    """An object as an attacker would pickle it: unpickling leaves a file of this path."""

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self}",)


def garbage(kind: str, evil: list[bytes]) -> list[list[bytes]]:
    """Messages that are no messages; the last two have a sound header."""
    header = Header(kind, "evil", "thinker", 9, 1)
    good = msgspec.msgpack.encode(header)
    announced = msgspec.msgpack.encode(msgspec.structs.replace(header, n_buffers=1))
    pickled = [[[data], [data] * 4, [MAGIC, data, data], [MAGIC, announced, data, data]] for data in evil]
    return [
        *itertools.chain.from_iterable(pickled),
        [b""],
        [MAGIC],
        [MAGIC, b"\xc1", b""],
        [b"\0" * 5000] * 20,
        [MAGIC, b"\x91" * 1000, b""],
        [MAGIC, good, b"", b"unannounced"],
        [MAGIC, msgspec.msgpack.encode(msgspec.structs.replace(header, kind="nonsense")), b""],
        [MAGIC, good, b"\x91" * 50_000],
        [MAGIC, good, msgspec.msgpack.encode({"type": kind, "x": 1})],
    ]


@pytest.mark.parametrize("frames", [[b"x"], encode(Header("", "nobody"), Abort())], ids=["garbage", "messages"])
def test_a_sender_without_end_keeps_no_stage_from_its_work(echo, sockets, frames):
    (inbox,) = echo.folder.glob("*/thinker-0-*")
    pids = [stage.pid for stage in echo.describe().stages]
    socket, over = sockets.push(f"ipc://{inbox}"), threading.Event()

    def send() -> None:
        while not over.is_set():
            if not try_send(socket, frames):
                time.sleep(0.0005)

    with OmniClient(echo.endpoint) as client, ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send)
        try:
            for text in ("the tide", "is full"):
                assert_echo(client.generate(text, timeout=30 * PATIENCE), text)
        finally:
            over.set()
        sending.result()
    assert [stage.pid for stage in echo.describe().stages] == pids


async def test_pickled_frames_are_garbage_on_every_socket(echo, sockets):
    marker = echo.folder / "unpickled"
    evil = [pickle.dumps(Exploit(str(marker)), protocol) for protocol in (0, 2, 5)]
    (run_dir,) = [entry for entry in echo.folder.iterdir() if (entry / "logs").is_dir()]
    inboxes = sorted(path for path in run_dir.iterdir() if re.fullmatch(r"[a-z0-9_]+-0-\d+", path.name))
    assert len(inboxes) == 4
    client = sockets.dealer(echo.endpoint, b"evil")[0]
    targets = [(sockets.push(f"ipc://{inbox}"), "chunk") for inbox in inboxes]
    targets.append((sockets.push(f"ipc://{run_dir}/results"), "audio"))
    targets.append((sockets.dealer(f"ipc://{run_dir}/control", b"evil")[0], "heartbeat"))
    targets.append((client, "submit"))
    before = rejected(echo)
    sent = 0
    async with AsyncOmniClient(echo.endpoint) as good:
        running = asyncio.create_task(good.generate("x" * 300))
        for socket, kind in targets:
            for frames in garbage(kind, evil):
                until(lambda socket=socket, frames=frames: try_send(socket, frames), 5, "sending")
                sent += 1
        await eventually(lambda: sum(rejected(echo).values()) == sum(before.values()) + sent, 5, "every one counted")
        assert (await running).text == "x" * 300
        assert_echo(await good.generate("unharmed"), "unharmed")
        shown = (await scrape(good)).series
    now = rejected(echo)
    for channel in ("client", "control", "results"):
        name = f"coordinator rejected_{channel}_invalid_payload"
        assert now[name] - before.get(name, 0) >= 2, "those with a sound header"
    told = sum(n for (name, labels), n in shown.items() if name == REJECTED.name and ("stage", "coordinator") in labels)
    assert told == sum(n for name, n in now.items() if name.startswith("coordinator "))
    assert {envelope.body.code.value for envelope in collect(client, [], 2)} == {"invalid_payload"}
    assert not marker.exists()
    pickle.loads(evil[2])  # noqa: S301 - the exploit does work
    assert marker.exists()
    marker.unlink()


def rejected(echo: EchoLauncher) -> dict[str, int]:
    """How many messages were rejected, by place and reason."""
    description = echo.describe()
    counts = {f"coordinator {name}": count for name, count in description.counts.items()}
    for stage in description.stages:
        counts |= {f"{stage.stage} {name}": count for name, count in stage.counts.items()}
    return {name: count for name, count in counts.items() if name.split(" ")[1].startswith("rejected_")}


WITHOUT_LINUX = """
import ctypes, os, signal, socket, sys, time
for module, prefixes in {
    os: ("eventfd", "EFD_", "memfd", "MFD_", "pidfd", "sched_", "pipe2", "splice"),
    signal: ("pidfd",), time: ("CLOCK_BOOT",), socket: ("SO_PEERCRED", "SO_DOMAIN"),
}.items():
    for name in [name for name in vars(module) if name.startswith(prefixes)]:
        delattr(module, name)
class Libc:
    def __init__(self, *arguments, **options): pass
ctypes.CDLL = Libc  # without prctl
"""
ASK = """
from omni_actors import OmniClient
from omni_actors.client import Audio
with OmniClient(sys.argv[1]) as client:
    items = list(client.submit("Why is the sea salt?", timeout=20))
    print("".join(item.text for item in items if not isinstance(item, Audio)))
    print(sum(len(item.samples) for item in items if isinstance(item, Audio)))
    print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "vllm", "transformers", "starlette", "soxr"}))
"""


def test_the_client_needs_nothing_that_only_linux_has_and_none_of_a_servers_packages(echo):
    text, samples, heavy = python("-c", WITHOUT_LINUX + ASK, echo.endpoint, check=True).stdout.splitlines()
    assert text == "Why is the sea salt?"
    assert int(samples) > 0
    assert heavy == "[]"
