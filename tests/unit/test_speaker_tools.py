"""The tools that make the speaking checkpoint: what it is asked, the judge, and the examples of its training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

from tests.support.paths import REPOSITORY
from tests.support.teacher import write_wordnet
from tools.checkpoints.measure import load_reference_model, quiet_transformers
from tools.speaker.codec import PHONES, SOUNDS, Sound
from tools.speaker.judge import Judge, held_out_speech
from tools.speaker.talker import Talker
from tools.speaker.texts import THINKER_KINDS, TOY, Texts, lines_of, pairs_of, plain
from tools.speaker.thinker import Question, inputs_of, pictured

pytestmark = pytest.mark.nightly

CHECKPOINT = REPOSITORY / "examples" / "speaker"
MAX_BYTES = 20_000_000  # it is a part of the repository
# What is said in docs/audio/boat.wav: phones, and how many codes each lasts.
BOAT = (
    "pau:3 dh:3 ax:2 ch:8 ih:3 l:5 d:3 r:2 ax:2 n:3 f:5 aw:8 n:4 d:2 ax:2 s:5 m:2 ao:4 l:3 b:3 ow:5 "
    "t:3 n:2 ih:3 r:4 dh:2 ax:2 r:5 ih:1 v:3 er:11 pau:6"
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts.read(write_wordnet(tmp_path_factory.mktemp("wordnet")))


@pytest.fixture(scope="module")
def model() -> Any:
    quiet_transformers()
    return load_reference_model(CHECKPOINT).requires_grad_(False)


@pytest.fixture(scope="module")
def processor() -> Any:
    return Qwen2_5OmniProcessor.from_pretrained(CHECKPOINT)


def test_the_checkpoint_is_whole_and_small() -> None:
    """Every tensor that its configuration asks for, finite, in less than 20 MB."""
    quiet_transformers()
    with torch.device("meta"):
        empty = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig.from_pretrained(CHECKPOINT))
    tensors = load_file(CHECKPOINT / "model.safetensors")
    assert {name: value.shape for name, value in tensors.items()} == {
        name: value.shape for name, value in empty.state_dict().items()
    }
    assert all(value.isfinite().all() for value in tensors.values())
    assert sum(value.numel() for value in tensors.values()) == 9_048_800
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < MAX_BYTES


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


def test_nothing_that_the_evaluation_asks_is_a_task_and_nothing_that_has_an_answer_is_refused(texts: Texts) -> None:
    rng = random.Random(0)
    tasks = [texts.ask(rng, THINKER_KINDS) for _ in range(30_000)]
    held_out, strange = dict(pairs_of("tasks.txt")), {plain(text) for text in lines_of("strange.txt")}
    refused = {plain(prompt) for prompt, reply in tasks if reply == TOY}
    answered = {plain(prompt) for prompt, reply in tasks if reply != TOY}
    assert not held_out.keys() & {prompt for prompt, _ in tasks}
    assert not strange & (refused | answered)
    assert not refused & answered
    assert not set(lines_of("spelling.txt")) & set(texts.to_spell)
    assert len(strange) == len(lines_of("strange.txt")) >= 100
    assert len(refused) > 4000


def test_the_checkpoint_knows_the_answers_of_the_thinkers_examples(texts: Texts, model: Any, processor: Any) -> None:
    """They stand as those did that it was trained on: with any other prompt or place it would not know them."""
    rng = random.Random(1)
    asked = [Question(*texts.ask(rng, THINKER_KINDS)) for _ in range(24)]
    for questions in (asked, [pictured(rng) for _ in range(8)], [*asked[:4], pictured(rng)]):
        batch = inputs_of(processor, questions, replies=True)
        said = processor.tokenizer.decode(batch["labels"][0][batch["labels"][0] >= 0])
        assert said == f"{questions[0].wanted}<|im_end|>"
        assert model.thinker(**batch).loss < 0.2, "8 for other tokens"


def test_the_checkpoint_says_the_codes_of_the_talkers_examples(
    texts: Texts, model: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher's codes of held-out sentences; the talker looks at the words that it is to look at."""
    monkeypatch.setattr("tools.speaker.talker.STRANGE", 0)
    monkeypatch.setattr("tools.speaker.talker.WITH_WRONG_CODES", 0)
    talker, rng = Talker(model, processor, texts, 8, 1), random.Random(1)
    for first in (0, 8):
        rows = [
            talker.row(rng, Question(f"Say: {text}", text), np.array(codes), voice)
            for text, voice, codes in held_out_speech()[first : first + 8]
        ]
        batch = talker.batch_of(rows)
        right = float(talker.loss(batch, 1.0))
        assert right < 0.7, "1 for words one token early, 6.7 for any code"
        batch["want"] = torch.where(batch["want"] > 0, batch["want"] - 1, batch["want"])
        assert talker.loss(batch, 1.0) > right + 0.3
