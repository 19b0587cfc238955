"""Adapters that come and go while a pipeline runs: what the coordinator decides, and from where they may come."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from omni_actors.config.checks import allowed_folder
from omni_actors.coordinator.core.adapters import LOAD_SECONDS, AdapterInstruction, AdapterRegistry, Settled
from omni_actors.coordinator.core.instructions import Instruction, TellReplica, ToStage
from omni_actors.coordinator.core.lifecycle import RequestMachine
from omni_actors.errors import ErrorCode, InvalidRequest, OmniError
from omni_actors.protocol.adapters import Adapter, AdapterLoaded, LoadAdapter, UnloadAdapter
from omni_actors.protocol.payloads import StageParams
from omni_actors.protocol.stage import OpenRequest
from tests.support.requests import ask, lose, ready, replica_id

ASKER = (b"operator", "1")


class Adapters:
    """A registry of a pipeline with two thinkers."""

    def __init__(self, *loaded: Adapter) -> None:
        self.machine: RequestMachine = ready(replicas=2)
        pipeline = msgspec.structs.replace(
            self.machine.pipeline, adapter_folders=["/srv"], adapters={"pirate": "/srv/pirate"}
        )
        self.versions = iter(range(1, 100))
        self.registry = AdapterRegistry(pipeline, self.machine.replicas, lambda: next(self.versions), loaded)
        self.machine.gate.adapters = self.registry.loaded

    def load(self, name: str) -> list[AdapterInstruction]:
        return self.registry.load(name, f"/srv/{name}", ASKER, now=0.0)

    def answer(self, index: int, version: int, problem: str = "") -> list[AdapterInstruction]:
        return self.registry.answered(replica_id("thinker", index), AdapterLoaded(version, problem))

    def loaded(self, name: str) -> Adapter:
        """Load one in all replicas."""
        for item in self.load(name):
            if isinstance(item, TellReplica) and isinstance(item.body, LoadAdapter):
                self.registry.answered(item.replica_id, AdapterLoaded(item.body.adapter.version))
        return self.registry.loaded[name]


def told(instructions: list[AdapterInstruction], kind: type) -> list[str]:
    return [item.replica_id.name for item in instructions if isinstance(item, TellReplica) and type(item.body) is kind]


def refusal(instructions: list[AdapterInstruction]) -> OmniError:
    (error,) = [item.error for item in instructions if isinstance(item, Settled)]
    assert error is not None
    return error


def test_an_adapter_is_there_when_every_replica_has_it() -> None:
    adapters = Adapters()
    assert told(adapters.load("poet"), LoadAdapter) == ["thinker/0", "thinker/1"]
    assert adapters.answer(0, 1) == []
    assert adapters.registry.names == ("pirate",)
    assert adapters.answer(1, 1) == [Settled(ASKER)]
    assert adapters.registry.names == ("pirate", "poet")


def test_an_adapter_that_one_replica_cannot_load_is_dropped_by_all() -> None:
    adapters = Adapters()
    adapters.load("poet")
    instructions = adapters.answer(1, 1, "its rank is 4000")
    assert told(instructions, UnloadAdapter) == ["thinker/0", "thinker/1"]
    assert "its rank is 4000" in str(refusal(instructions))
    assert adapters.answer(0, 1) == [], "too late"
    assert adapters.registry.names == ("pirate",)
    assert adapters.load("poet"), "the name is free again"


def test_replicas_that_do_not_answer_are_not_waited_for_for_ever() -> None:
    adapters = Adapters()
    adapters.load("poet")
    assert adapters.registry.tick(LOAD_SECONDS - 1) == []
    assert refusal(adapters.registry.tick(LOAD_SECONDS)).code is ErrorCode.TIMEOUT


def test_a_lost_replica_is_not_waited_for_and_its_successor_is_told() -> None:
    adapters = Adapters(Adapter("poet", "/srv/poet", 7))
    first, second = (item.replica_id for item in adapters.load("bard") if isinstance(item, TellReplica))
    replica = adapters.machine.replicas.at(first)
    assert replica is not None
    assert adapters.registry.lost(replica) == []
    assert adapters.registry.answered(second, AdapterLoaded(1)) == [Settled(ASKER)]
    assert [item.body.adapter.name for item in adapters.registry.ready(replica)] == ["poet", "bard"]
    stranger = adapters.machine.replicas.of("prompt")[0]
    assert adapters.registry.ready(stranger) == []


@pytest.mark.parametrize(
    ("name", "says"), [("pirate", "already"), ("poet", "already"), ("tiny", None), ("bard", "already")]
)
def test_a_name_stands_for_one_adapter(name: str, says: str | None) -> None:
    adapters = Adapters(Adapter("poet", "/srv/poet", 7))
    adapters.load("bard")
    if says is None:
        assert told(adapters.load(name), LoadAdapter)
        return
    with pytest.raises(InvalidRequest, match=says) as caught:
        adapters.load(name)
    assert caught.value.field == "name"


def test_a_request_keeps_the_adapter_with_which_it_began() -> None:
    adapters = Adapters()
    state, adapter = adapters.machine, adapters.loaded("poet")
    named = {"thinker": StageParams(adapter="poet")}
    opened = adapters_of(ask(state, params=named))
    assert opened == {"code2wav": None, "talker": None, "thinker": adapter, "prompt": None}
    assert told(adapters.registry.unload("poet"), UnloadAdapter) == ["thinker/0", "thinker/1"]
    held = state.active["r1"].bound["thinker"]
    assert adapters_of(lose(state, "thinker", held.replica))["thinker"] == adapter
    (refused,) = ask(state, request_id="later", params=named)
    assert "no adapter 'poet'" in refused.body.message


def adapters_of(instructions: list[Instruction]) -> dict[str, Adapter | None]:
    """The adapter with which each stage is to run a request."""
    return {
        item.replica_id.stage: item.body.adapter
        for item in instructions
        if isinstance(item, ToStage) and isinstance(item.body, OpenRequest)
    }


def test_adapters_come_from_the_folders_that_are_allowed(tmp_path: Path) -> None:
    allowed = tmp_path / "adapters"
    (allowed / "poet").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (allowed / "link").symlink_to(tmp_path / "secret")
    assert allowed_folder(str(allowed / "poet"), [str(allowed)]) == allowed / "poet"
    for folder in ("poet", f"{allowed}/../secret", f"{allowed}/link", f"{allowed}/none", "/", f"{allowed}/\0"):
        with pytest.raises(InvalidRequest) as caught:
            allowed_folder(folder, [str(allowed)])
        assert caught.value.field == "folder"
