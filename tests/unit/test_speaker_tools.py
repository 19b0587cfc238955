"""The speaking checkpoint in the repository, the judge of what it says, and the losses by which it is trained."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch.nn import functional

from tests.support.paths import REPOSITORY
from tools.checkpoints.reference import load_reference_model
from tools.speaker import train
from tools.speaker.codec import PHONES, SOUNDS, Sound
from tools.speaker.conversations import IGNORED, Conversation, Question, examples_of, inputs_of
from tools.speaker.judge import Judge
from tools.speaker.talker import GUIDE_WEIGHT, GUIDED, Talker, guide_loss, padded
from tools.speaker.texts import Texts
from tools.speaker.thinker import Thinker

pytestmark = pytest.mark.nightly

# What is said in docs/audio/boat.wav: phones, and how many codes each lasts.
BOAT = (
    "pau:3 dh:3 ax:2 ch:8 ih:3 l:5 d:3 r:2 ax:2 n:3 f:5 aw:8 n:4 d:2 ax:2 s:6 m:1 ao:4 l:3 b:4 ow:4 "
    "t:3 n:3 ih:2 r:5 dh:2 ax:2 r:5 ih:1 v:3 er:11 pau:6"
)


def test_the_judge_tells_phones_from_what_is_broken() -> None:
    """A recording of the checkpoint's voice in the documentation, and the phones that are said in it."""
    wave, rate = soundfile.read(REPOSITORY / "docs" / "audio" / "boat.wav", dtype="float32")
    assert rate == 24_000
    spans = [span.split(":") for span in BOAT.split()]
    codes = [
        1 + SOUNDS.index(Sound(PHONES.index(phone), 0, False, 0)) for phone, count in spans for _ in range(int(count))
    ]
    judge = Judge.load()
    assert judge.wrong_frames(wave, codes) < 0.5
    late = np.roll(wave, 2400)
    noise = np.random.default_rng(0).normal(0, 0.1, len(wave)).astype(np.float32)
    for broken in (0 * wave, wave[::-1], late, noise):
        assert judge.wrong_frames(broken, codes) > 0.8
    with pytest.raises(ValueError, match="frames"):
        judge.wrong_frames(wave[:-480], codes)


def asked() -> list[Conversation]:
    """Conversations of one and two turns, with sounds and pictures of several sizes."""
    noise = np.random.default_rng(1).normal(0, 0.1, 60_000).astype(np.float32)
    grain = Image.fromarray((np.random.default_rng(2).random((300, 400, 3)) * 255).astype(np.uint8))
    blue = Question("What do you see?", "I see a blue circle.", picture=grain.resize((168, 280)))
    heard = Question("", "I hear something.", sound=noise, picture=grain)
    return [
        Conversation([blue, heard], "Be kind."),
        Conversation([Question("What is that?", "Four.", sound=noise[:9000])]),
    ]


@pytest.fixture(scope="module")
def processor() -> Any:
    """What makes tokens of texts, sounds and pictures."""
    from transformers import Qwen2_5OmniProcessor

    return Qwen2_5OmniProcessor.from_pretrained(REPOSITORY / "examples" / "speaker")


def model() -> Any:
    """The checkpoint in transformers, in float32."""
    return load_reference_model(Path(REPOSITORY / "examples" / "speaker"))


def plain(processor: Any, conversations: list[Conversation]) -> dict[str, Any]:
    """What transformers' own forward pass takes; pictures come in half precision."""
    made = inputs_of(processor, conversations, replies=True)
    return made | {name: value.half().float() for name, value in made.items() if name == "pixel_values"}


def given(arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A batch as the training's loop hands it over."""
    return {name: value if value.ndim else int(value) for name, value in arrays.items()}


@pytest.mark.parametrize("conversations", [asked(), [Conversation([Question("Hello!", "Hello! How are you?")])]])
def test_the_thinkers_loss_is_that_of_transformers(processor: Any, conversations: list[Conversation]) -> None:
    """The towers take all sounds and pictures at once, and the layers are called one by one."""
    part, other = Thinker(model(), processor, Texts([], []), 2, 0), model().thinker
    with torch.no_grad():
        loss = part.loss(given(examples_of(processor, part.module, conversations)), 0.0)
        wanted = other(**plain(processor, conversations), use_cache=False).loss
    assert float(loss) == pytest.approx(float(wanted), rel=1e-4)


def test_the_talkers_loss_is_that_of_transformers(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the attention that is guided, and the thinker's states as `generate()` hands them over."""
    monkeypatch.setattr("tools.speaker.talker.STRANGE", 0.0)
    other, conversations, rng = model(), asked(), random.Random(3)
    part = Talker(model(), processor, Texts([], []), 2, 0)
    heard = examples_of(processor, part.thinker, conversations)
    whole, sizes = heard["input_ids"].shape[1], heard["attention_mask"].sum(1).tolist()
    codes = np.array([rng.randint(1, len(SOUNDS)) for _ in range(70)])
    rows = [
        part.row(rng, one.turns[-1].wanted, codes, size, whole, "Ethan")
        for one, size in zip(conversations, sizes, strict=True)
    ]
    batch = given(padded(rows) | {f"thinker_{name}": value for name, value in heard.items()})
    inputs = plain(processor, conversations)
    with torch.no_grad():
        loss = part.loss(batch, 0.0)
        states = other.thinker(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        media = torch.isin(inputs["input_ids"], torch.tensor(part.media))[..., None]
        for source, side, said in zip(
            batch["source"], batch["text_side"], states[-1] + states[0].masked_fill(media, 0), strict=True
        ):
            torch.testing.assert_close(side[source > 0], said[source[source > 0]], rtol=1e-4, atol=1e-4)
        other.talker.set_attn_implementation("eager")
        place = torch.arange(batch["code"].shape[1])[None]
        codec = other.talker.get_input_embeddings()(batch["code"]) * (place >= batch["prompt"])[..., None]
        read = other.talker.thinker_to_talker_proj(batch["text_side"] + codec)
        made = other.talker.model(inputs_embeds=read, output_attentions=True, use_cache=False)
        logits = other.talker.codec_head(made.last_hidden_state).flatten(0, 1)
        wanted = functional.cross_entropy(logits, batch["target"].flatten(), ignore_index=IGNORED)
        guides = [guide_loss(made.attentions[layer][:, :3:2], batch["key"], batch["want"]) for layer in GUIDED]
    assert float(loss) == pytest.approx(float(wanted + GUIDE_WEIGHT * torch.stack(guides).mean()), rel=1e-5)


def test_batches_come_again_while_others_are_made_until_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches of 808 bytes there is room for four; the workers have another one only when each was used enough."""
    monkeypatch.setattr(train, "KEPT", 3300)
    wanted = threading.Semaphore(0)

    def make() -> Iterator[dict[str, Any]]:
        for number in range(10):
            assert wanted.acquire(timeout=60)
            yield {"row": np.full(100, number), "number": np.array([number]), "size": np.array(number)}

    batches, seen = train.fed(make(), "cpu", random.Random(1)), list[int]()
    for step in range(10 * train.USES):
        if step % train.USES == 0:
            wanted.release()
        batch = next(batches)
        assert batch["row"].tolist() == [batch["size"]] * 100
        seen.append(batch["size"])
    assert seen[:: train.USES] == [*range(10)]
    assert {step // train.USES - number for step, number in enumerate(seen)} == {0, 1, 2, 3}
