"""LoRA adapters as models of the HTTP server, with echo stages, which take any adapter."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import openai
import psutil
import pytest

from omni_actors.client import OmniClient
from omni_actors.errors import InvalidRequest
from omni_actors.http_server.app import create_app
from omni_actors.http_server.reservations import BodyBytes
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.state import ServerState
from tests.support.paths import REPOSITORY
from tests.support.processes import processes_titled
from tests.support.servers import ADAPTER_FOLDER, OPERATOR_KEY, HttpPipeline, serving
from tests.support.waiting import until

HELLO = [{"role": "user", "content": "hello, sea"}]


def test_an_adapter_is_a_model_whose_parent_is_the_pipelines(echo: HttpPipeline) -> None:
    client = echo.openai()
    parents = {model.id: model.parent for model in client.models.list()}
    assert parents["pirate"] == "echo"
    assert client.models.retrieve("pirate").parent == "echo"
    answer = client.chat.completions.create(model="pirate", messages=HELLO)
    assert (answer.model, answer.choices[0].message.content) == ("pirate", "hello, sea")
    assert client.completions.create(model="pirate", prompt="abc").model == "pirate"
    with pytest.raises(openai.NotFoundError, match="pirate") as caught:
        client.chat.completions.create(model="poet", messages=HELLO)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_the_text_stage_runs_the_adapter_that_a_request_names(echo: HttpPipeline) -> None:
    with OmniClient(echo.endpoint) as client:
        description = client.describe()
        assert client.generate("hello", params={"thinker": {"adapter": "pirate"}}, timeout=60).text == "hello"
        with pytest.raises(InvalidRequest, match="no adapter 'poet'") as caught:
            client.generate("hello", params={"thinker": {"adapter": "poet"}}, timeout=60)
        assert caught.value.field == "adapter"
    assert description.adapters == ("pirate",)
    state = ServerState(ServerSettings(endpoint=echo.endpoint), BodyBytes(1 << 20))
    assert state.adapted("pirate", description, {"top_p": 0.5}) == {"top_p": 0.5, "adapter": "pirate"}
    assert state.adapted("echo", description, {"top_p": 0.5}) == {"top_p": 0.5}


def ctl(echo: HttpPipeline, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omni_actors", "ctl", echo.endpoint, "lora", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def names(echo: HttpPipeline) -> set[str]:
    return {model["id"] for model in httpx.get(f"{echo.url}/v1/models").json()["data"]}


def ask(echo: HttpPipeline, route: str, key: str = OPERATOR_KEY, **body: object) -> tuple[int, str]:
    """Status, and the text of a success or the field and code of an error."""
    answer = httpx.post(f"{echo.url}/v1/{route}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=30)
    if answer.is_success:
        return answer.status_code, answer.text
    error = answer.json()["error"]
    return answer.status_code, f"{error['param']} {error['code']}"


def test_vllms_routes_load_and_unload_adapters_for_those_with_the_operators_key(echo: HttpPipeline) -> None:
    folder = str(ADAPTER_FOLDER / "startup")
    assert ask(echo, "load_lora_adapter", "stranger", lora_name="sailor", lora_path=folder)[0] == 401
    added = "Success: LoRA adapter 'sailor' added successfully."
    assert ask(echo, "load_lora_adapter", lora_name="sailor", lora_path=folder) == (200, added)
    assert "sailor" in names(echo)
    answer = echo.openai().chat.completions.create(model="sailor", messages=HELLO)
    assert (answer.model, answer.choices[0].message.content) == ("sailor", "hello, sea")
    again = ask(echo, "load_lora_adapter", lora_name="sailor", lora_path=folder)
    assert again == (400, "lora_name invalid_request")
    outside = ask(echo, "load_lora_adapter", lora_name="other", lora_path="/etc")
    assert outside == (400, "lora_path invalid_request")
    assert ask(echo, "load_lora_adapter", lora_name="other", lora_path=f"{folder}/none")[0] == 400
    assert ask(echo, "unload_lora_adapter", lora_name="pirate") == (400, "lora_name invalid_request"), "of the YAML"
    assert ask(echo, "unload_lora_adapter", lora_name="sailor")[0] == 200
    assert ask(echo, "unload_lora_adapter", lora_name="sailor") == (404, "lora_name not_found")
    assert "sailor" not in names(echo)


def test_without_a_key_for_operators_there_are_no_such_routes(echo: HttpPipeline) -> None:
    app = create_app(ServerSettings(endpoint=echo.endpoint))
    with serving(app) as url:
        body = {"lora_name": "sailor", "lora_path": str(ADAPTER_FOLDER)}
        for route in ("load", "unload"):
            sent = {"lora_name": "pirate"} if route == "unload" else body
            answer = httpx.post(f"{url}/v1/{route}_lora_adapter", json=sent)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "sailor" not in names(echo)


def test_processes_that_start_later_know_the_adapters_of_operators(echo: HttpPipeline) -> None:
    loads = ctl(echo, "load", "captain", str(ADAPTER_FOLDER / "startup"))
    assert loads.stdout.split() == ["pirate", "captain"], loads.stderr
    (coordinator,) = processes_titled("omni:coordinator", echo.process.pid)
    with OmniClient(echo.endpoint) as client:
        (thinker,) = [stage.pid for stage in client.describe().stages if stage.stage == "thinker"]
    log = echo.run_dir / "logs" / "thinker-0.log"
    for victim, times in ((thinker, 2), (coordinator, 3)):
        psutil.Process(victim).kill()
        until(lambda times=times: log.read_text().count("loaded the adapter captain") == times)
    until(lambda: httpx.get(f"{echo.url}/health").status_code == 200)
    assert echo.openai().chat.completions.create(model="captain", messages=HELLO).model == "captain"
    listed = ctl(echo, "list")
    assert listed.stdout.split() == ["pirate", "captain"]
    unloads = ctl(echo, "unload", "captain")
    assert unloads.stdout.split() == ["pirate"], unloads.stderr
    wrong = ctl(echo, "unload", "captain")
    assert wrong.returncode == 1
    assert "no adapter 'captain'" in wrong.stderr
    assert json.loads((echo.run_dir / "adapters.json").read_text()) == []
