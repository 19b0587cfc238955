"""The system's clock is set while requests run: nothing ends early, nothing lives longer than it may."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from omni_actors.client import OmniClient
from omni_actors.errors import DeadlineExceeded, OmniError
from tests.support.builders import chain
from tests.support.launcher import EchoLauncher
from tests.support.processes import coordinator_of
from tests.support.waiting import until

# Python imports this at the start of every process of the pipeline. The offset is the target of a link.
SETTABLE_CLOCK = """
import os, time
usual, usual_ns = time.time, time.time_ns

def offset():
    try:
        return float(os.readlink({link!r}))
    except OSError:
        return 0.0

time.time = lambda: usual() + offset()
time.time_ns = lambda: usual_ns() + int(offset() * 1e9)
"""


@pytest.mark.nightly
def test_requests_outlive_jumps_of_the_clock_and_deadlines_hold(
    launch: Callable[..., EchoLauncher], short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, usual = short_path / "offset", time.time
    (short_path / "sitecustomize.py").write_text(SETTABLE_CLOCK.format(link=str(link)))

    def set_clock(offset: float) -> None:
        (short_path / "new").symlink_to(str(offset))
        (short_path / "new").replace(link)
        monkeypatch.setattr(time, "time", lambda: usual() + offset)

    data = chain()
    data["stages"][0]["engine"] = {"step_seconds": 0.4}
    launcher = launch(data, path=str(short_path)).wait_ready()

    def answers_in_time(client: OmniClient) -> bool:
        try:
            return client.generate("r", modalities=["text"], timeout=20).text == "r"
        except OmniError:
            return False

    with OmniClient(launcher.endpoint) as client:
        for offset in (3600.0, -3600.0):
            running = client.submit("xyz", timeout=60)
            until(lambda: client.describe().in_flight == 1, 5, "admitted")
            time.sleep(0.2)  # in the middle of a step: a message that is on its way has its deadline moved
            set_clock(offset)
            assert running.result().text == "xyz"
            assert client.generate("a", timeout=60).text == "a"
            with pytest.raises(DeadlineExceeded):
                client.generate("y" * 100, timeout=0.3)
        psutil.Process(coordinator_of(short_path)).kill()
        until(lambda: answers_in_time(client), 20, "a coordinator that was started after the jumps")
        with OmniClient(launcher.endpoint) as later:
            assert later.generate("l", timeout=60).text == "l"
