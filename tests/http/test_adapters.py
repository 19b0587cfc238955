"""LoRA adapters as models of the HTTP server, with echo stages, which take any adapter."""

from __future__ import annotations

import openai
import pytest

from omni_actors.client import OmniClient
from omni_actors.errors import InvalidRequest
from omni_actors.http_server.settings import ServerSettings
from omni_actors.http_server.state import ServerState
from omni_actors.protocol.payloads import StageParams
from omni_actors.sharing import Budget
from tests.support.servers import HttpPipeline

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
    state = ServerState(ServerSettings(endpoint=echo.endpoint), Budget(1 << 20))
    adapted = state.stage_params("pirate", {}, description, {"top_p": 0.5})
    assert adapted == {"thinker": StageParams(top_p=0.5, adapter="pirate")}
    assert state.stage_params("echo", {}, description, {"top_p": 0.5}) == {"thinker": StageParams(top_p=0.5)}
