"""What a stage recorded gives the same output when it is replayed into that stage alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from omni_actors.cli.replay import replay
from omni_actors.client import AsyncOmniClient
from omni_actors.errors import EngineError, InvalidRequest, OmniError
from omni_actors.stage.echo import FAIL_TOKEN
from omni_actors.stage.recorder import INBOUND, LENGTH, read
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.paths import REPOSITORY

REGRESSION = Path(__file__).parent / "recordings" / "talker.omnirec"


async def record(launch: Callable[..., EchoLauncher], folder: Path) -> None:
    data = chain()
    for stage in data["stages"]:
        stage["engine"] = {"row_width": 2000, "samples_per_token": 10}
    echo = launch(data, "--record", str(folder)).wait_ready()
    async with AsyncOmniClient(echo.endpoint) as client:
        await asyncio.gather(*(client.generate(f"request {number}") for number in range(8)))
        stream = await client.submit("z" * 500)
        await anext(stream)
        await stream.abort()
        with pytest.raises(EngineError):
            await client.generate({"prompt_token_ids": [65, FAIL_TOKEN]})
    echo.wait_idle()
    assert echo.end() == 0


async def test_every_stage_gives_the_same_again(launch: Callable[..., EchoLauncher], short_path: Path) -> None:
    folder = short_path / "rec"
    await record(launch, folder)
    files = sorted(folder.iterdir())
    assert [file.name.split("-")[0] for file in files] == ["code2wav", "prompt", "talker", "thinker"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    for file in files:
        comparison = replay(file)
        assert comparison.differences == [], file.name
        assert comparison.finished >= 8


def run(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omni_actors", "replay", str(file)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_regression_recording() -> None:
    """A recording of the first version of this wire, under today's names: its outputs are still the same."""
    done = run(REGRESSION)
    assert done.returncode == 0
    assert done.stdout == "3 requests, 0 differences\n", done.stderr


def test_a_difference_is_found(short_path: Path) -> None:
    data = REGRESSION.read_bytes()
    changed = short_path / "changed.omnirec"
    origin, entries = read(REGRESSION)
    texts = [LENGTH.pack(len(record)) + record for record in map(msgspec.msgpack.encode, [origin, *entries])]
    assert b"".join(texts) == data
    last_chunk = max(i for i, entry in enumerate(read(REGRESSION)[1]) if entry.direction not in (INBOUND, ""))
    changed.write_bytes(b"".join(text for i, text in enumerate(texts) if i != last_chunk + 1))
    done = run(changed)
    assert done.returncode == 1
    assert "final: False then, True now" in done.stdout or "token_ids" in done.stdout
    changed.write_bytes(data[:-7])
    assert run(changed).returncode in (0, 1), "cut off in the middle of a record"


def test_what_is_no_recording(short_path: Path) -> None:
    wrong = short_path / "wrong"
    for content in (b"", b"xx", LENGTH.pack(3) + b"abc", LENGTH.pack(2) + b"\x91\x01"):
        wrong.write_bytes(content)
        with pytest.raises(InvalidRequest, match="is not a recording"):
            replay(wrong)
    with pytest.raises(OmniError, match="Cannot read"):
        replay(short_path / "missing")
    origin, _ = read(REGRESSION)
    other = msgspec.structs.replace(origin, pipeline_json=origin.pipeline_json.replace(b'"stages"', b'"phases"'))
    header = msgspec.msgpack.encode(other)
    wrong.write_bytes(LENGTH.pack(len(header)) + header)
    with pytest.raises(InvalidRequest, match="configuration of another schema"):
        replay(wrong)
    assert run(wrong).returncode == 2
