"""No log of a real pipeline quotes a prompt or an answer, also when requests fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_actors.client import OmniClient
from omni_actors.errors import InvalidRequest
from tests.support.servers import HttpPipeline

pytestmark = pytest.mark.e2e

SECRET = "my bank account is 4711-0815"


def test_no_log_quotes_a_prompt_or_an_answer(tiny_http: HttpPipeline) -> None:
    with OmniClient(tiny_http.endpoint) as client:
        answer = client.generate(SECRET, params={"thinker": {"max_tokens": 24, "ignore_eos": True}}, timeout=60)
        with pytest.raises(InvalidRequest):
            client.generate(f"<|AUDIO|> {SECRET}", timeout=60)
    with pytest.raises(Exception, match="AUDIO"):
        tiny_http.openai().chat.completions.create(
            model="tiny-qwen2.5-omni", messages=[{"role": "user", "content": f"<|AUDIO|> {SECRET}"}]
        )
    logs = {path.name: path.read_text() for path in Path(tiny_http.run_dir / "logs").iterdir()}
    assert {"prompt-0.log", "thinker-0.log", "talker-0.log", "code2wav-0.log", "http.log"} <= set(logs)
    for name, text in logs.items():
        assert SECRET not in text, name
        assert answer.text not in text, name
