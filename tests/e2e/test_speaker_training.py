"""The speaking checkpoint is made from nothing: some steps of each part, and what comes out answers."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from safetensors.torch import load_file

from omni_actors.client import OmniClient
from tests.support.pipelines import RunningPipeline
from tests.support.teacher import write_teacher, write_wordnet
from tools.checkpoints.measure import quiet_transformers
from tools.speaker import SpeakerError, teacher
from tools.speaker.__main__ import main
from tools.speaker.train import train

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

STEPS = {
    "dit": ("token2wav.code2wav_dit_model.", 12),
    "vocoder": ("token2wav.code2wav_bigvgan_model.", 4),
    "thinker": ("thinker.", 12),
    "talker": ("talker.", 12),
}
LIMITS = {"thinker": {"max_tokens": 8}, "talker": {"max_tokens": 40}}


@pytest.fixture
def wordnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(teacher, "PROGRAM", write_teacher(tmp_path))
    return write_wordnet(tmp_path)


def test_each_part_learns_and_changes_no_other_and_the_checkpoint_answers(tmp_path: Path, wordnet: Path) -> None:
    quiet_transformers()
    folder = tmp_path / "speaker"
    assert main(["new", str(folder)]) == 0
    tensors = load_file(folder / "model.safetensors")
    for part, (prefix, steps) in STEPS.items():
        losses = train(part, folder, wordnet, steps, batch=2, device="cpu", rate=None)
        assert len(losses) == steps
        assert sum(losses[-3:]) < sum(losses[:3]), part
        before, tensors = tensors, load_file(folder / "model.safetensors")
        changed = {name for name, value in tensors.items() if not value.equal(before[name])}
        assert changed, part
        assert all(name.startswith(prefix) for name in changed), part
    with (
        RunningPipeline("stage_configs/tiny_speaker.yaml", {"model": folder}) as pipeline,
        OmniClient(pipeline.endpoint) as client,
    ):
        answer = client.generate("Say: hello", params=LIMITS, seed=1, timeout=120)
    assert 0 < len(answer.token_ids) <= 8
    assert 0 < len(answer.audio) <= 40 * 480
    assert numpy.isfinite(answer.audio).all()


def test_what_is_missing_is_named(tmp_path: Path, wordnet: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "dit", str(tmp_path / "nowhere")]) == 1
    assert "holds no checkpoint: python -m tools.speaker new" in capsys.readouterr().err
    assert main(["new", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "speaker")]) == 0
    assert main(["train", "thinker", str(tmp_path / "speaker"), "--wordnet", str(tmp_path / "speaker")]) == 1
    assert "holds no WordNet: apt-get install wordnet-base" in capsys.readouterr().err
    (tmp_path / "phones").unlink()
    with pytest.raises(SpeakerError, match=r"build it with tools/speaker/flite/build\.sh"):
        train("thinker", tmp_path / "speaker", wordnet, 1, batch=2, device="cpu", rate=None)
