"""A spoken turn that the tiny Qwen2.5-Omni pipeline computes while the user speaks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from omni_actors.client import OmniClient
from tests.support.paths import REPOSITORY
from tests.support.realtime import answer_on, openai_session
from tests.support.servers import HttpPipeline, data_uri, picture

pytestmark = pytest.mark.e2e

MODEL = "tiny-qwen2.5-omni"


@pytest.fixture
def tiny(tiny_http: HttpPipeline) -> Iterator[HttpPipeline]:
    yield tiny_http
    tiny_http.assert_idle()


async def test_a_picture_is_seen(tiny: HttpPipeline) -> None:
    item = {"type": "message", "role": "user"}
    item["content"] = [{"type": "input_image", "image_url": data_uri("image/png", picture(112, 112))}]
    async with openai_session(tiny.url, MODEL, output_modalities=["text"], seed=5) as connection:
        await connection.conversation.item.create(item=item)
        await connection.response.create(response={"max_output_tokens": 12})
        usage = (await answer_on(connection)).response.usage
    with OmniClient(tiny.endpoint) as client:
        content = [{"type": "image", "image": picture(112, 112)}]
        wanted = client.generate(
            [{"role": "user", "content": content}], modalities=["text"], params={"thinker": {"max_tokens": 1}}
        )
    assert usage.input_tokens == wanted.usage["thinker"].input_tokens > 16, "a token for 28 x 28 pixels"


@pytest.mark.nightly
def test_the_documented_sound_that_grows_is_answered(tiny: HttpPipeline) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "client.md").read_text(), re.M | re.S)
    (block,) = [block for block in blocks if '"max_tokens": 0' in block]
    done = subprocess.run(
        [sys.executable, "-c", block.replace("ipc:///tmp/omni-x/client", tiny.endpoint)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
