"""Which replicas run under MPS, what their processes get for it, and how a user says so."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from omni_actors.config.placement import shared_devices
from omni_actors.errors import ConfigError
from omni_actors.launcher.mps import NO_MPS, MpsClients, answers, daemon_gpus
from tests.support.builders import chain, load
from tests.support.other_user import AS_ROOT, NOBODY, python

KINDS = {"thinker": "autoregressive", "talker": "autoregressive", "code2wav": "diffusion"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMNI_ACTORS_MPS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def models(**stages: dict[str, Any]) -> dict[str, Any]:
    """The chain with models that fit on one GPU, and further fields by stage."""
    data = chain()
    for stage in data["stages"]:
        stage["kind"] = KINDS.get(stage["name"], "prompt")
        if stage["kind"] == "autoregressive":
            stage["engine"] = {"gpu_memory_utilization": 0.2}
        stage.update(stages.get(stage["name"], {}))
    return data


def shared(folder: Path, data: dict[str, Any], devices: int = 2, rank: int = 0) -> dict[int, list[tuple[str, int]]]:
    return shared_devices(load(folder, data, devices=devices).pipeline, rank, devices)


def test_stages_on_one_gpu_share_it_and_what_computes_alone_or_on_none_shares_nothing(tmp_path: Path) -> None:
    assert shared(tmp_path, models()) == {0: [("thinker", 0), ("talker", 0), ("code2wav", 0)]}
    assert daemon_gpus(load(tmp_path, models(), devices=2).pipeline, 2) == [0]
    assert shared(tmp_path, models(), devices=0) == {}
    apart = models(talker={"devices": [1]}, code2wav={"devices": [2]})
    assert shared(tmp_path, apart, devices=3) == {}
    echo = chain()
    for stage in echo["stages"]:
        stage["devices"] = [0]
    assert shared(tmp_path, echo) == {}, "echo stages never touch it"
    only_one = models(code2wav={"devices": [1]}, talker={"kind": "echo", "devices": [0], "engine": {}})
    only_one["stages"][0]["devices"] = [0]  # the prompt stage computes on the CPU
    assert shared(tmp_path, only_one) == {}


LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


@AS_ROOT
@pytest.mark.parametrize("user", [0, NOBODY])
def test_a_daemon_of_another_user_is_not_used(short_path: Path, user: int) -> None:
    short_path.chmod(0o777)
    command = [python(), "-S", "-c", LISTENER, str(short_path / "control")]
    with subprocess.Popen(command, user=user, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout.readline() == b"listens\n"
        assert answers(str(short_path)) is (user == 0)
        daemon.communicate()


@pytest.mark.parametrize(
    ("there", "most", "percent"), [(132, 32, "25"), (132, 64, "49"), (114, 32, "29"), (32, 32, None)]
)
def test_a_stage_gets_the_part_of_the_gpu_that_holds_its_multiprocessors(
    there: int, most: int, percent: str | None
) -> None:
    expected = {} if percent is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent}
    assert MpsClients("", {}, there).apply(["0"], {}, most) == (["0"], expected), "of another's daemon"
    if percent is not None:
        assert int(there * int(percent) / 100) // 2 * 2 == most, "as the driver rounds it"


def test_a_part_is_given_to_autoregressive_stages_on_hosts_with_mps_that_name_none(tmp_path: Path) -> None:
    own = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    assert MpsClients("", {}, 132).apply(["0"], own, 32) == (["0"], own)
    assert MpsClients("", {}, 132).apply(["0"], {}) == (["0"], {})
    assert MpsClients("", {}, 132).apply([], {}, 32) == ([], {}), "on no GPU"
    assert NO_MPS.apply(["0"], {}, 32) == (["0"], {})
    assert load(tmp_path, models(talker={"multiprocessors": 32})).pipeline.stage("talker").multiprocessors == 32
    with pytest.raises(ConfigError, match=r"code2wav\.multiprocessors does not apply to a stage of kind diffusion"):
        load(tmp_path, models(code2wav={"multiprocessors": 32}))


def test_it_is_switched_off_in_the_yaml_the_environment_or_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, mode in (({}, "auto"), ({"mps": False}, "off"), ({"mps": "off"}, "off")):  # YAML reads off as False
        assert load(tmp_path, {**chain(), **given}).pipeline.mps == mode
    monkeypatch.setenv("OMNI_ACTORS_MPS", "off")
    off, auto = (load(tmp_path, chain(), given).pipeline for given in (None, {"mps": "auto"}))
    assert (off.mps, auto.mps) == ("off", "auto")
    assert auto.digest() == off.digest(), "each host may choose"
    for wrong in ("on", True, 1):
        with pytest.raises(ConfigError, match="mps"):
            load(tmp_path, chain(), {"mps": str(wrong)})
