"""The oracle itself: its answers vary, and it keeps what transformers would lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.reference import one_thread, vocoder_noise
from tests.support.stage_driver import VOICES
from tools.checkpoints.measure import failed_checks, measure_answers


@pytest.fixture(scope="module")
def hello(reference):
    return answer(reference, "hello")


def answer(reference, prompt, **options):
    return reference.generate(reference.inputs([{"role": "user", "content": prompt}]), **options)


@pytest.mark.nightly
def test_the_promised_figures(tiny_checkpoint):
    """What the command line checks after writing: texts in both voices, and audio, images, video."""
    with one_thread():
        answers = measure_answers(tiny_checkpoint)
    assert failed_checks(answers) == []
    # float32 rounding moves a logit by up to 6e-5; a gap of that size could flip a token between two implementations.
    assert min(min(answer.thinker_gap, answer.codec_gap) for answer in answers) > 2e-4


def test_answers_vary_with_prompt_and_voice(reference, answers, hello):
    assert len({tuple(result.thinker_tokens[:4]) for result in answers}) == len(answers)
    assert len({tuple(result.codec_tokens) for result in answers}) == len(answers)
    for result in answers:
        assert len(result.thinker_tokens) == 32
        assert len(set(result.thinker_tokens)) >= 10
        assert len(result.codec_tokens) == 64
        assert len(set(result.codec_tokens)) >= 10
    other = answer(reference, "hello", voice=VOICES[1], speaks=False)
    assert other.thinker_tokens == hello.thinker_tokens
    assert other.codec_tokens != hello.codec_tokens
    assert 0.05 < hello.waveform.abs().max() < 0.95
    assert hello.waveform.shape == (64 * 480,)


def test_rows_are_hidden_state_plus_embedding_and_the_talkers_prompt_has_the_codec_tokens(reference, hello):
    """By one forward pass over prompt and reply; what transformers 5.19 loses with the mask: the last two rows."""
    ids = torch.tensor([hello.prompt_token_ids + hello.thinker_tokens[:-1]])
    with torch.no_grad():
        output = reference.model.thinker(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    rows = output.hidden_states[-1][0] + output.hidden_states[0][0]
    torch.testing.assert_close(hello.thinker_rows, rows, atol=1e-4, rtol=1e-4)
    config, prompt = reference.model.config.talker_config, len(hello.prompt_token_ids)
    text, codec = (model.get_input_embeddings().weight for model in (reference.model.thinker, reference.model.talker))
    wanted = [
        text[reference.voices["Chelsie"]["bos_token"]] + codec[config.tts_codec_pad_token_id],
        hello.thinker_rows[prompt] + codec[config.tts_codec_start_token_id],
    ]
    torch.testing.assert_close(hello.talker_prompt_embeds, torch.cat([rows[:prompt], torch.stack(wanted)]))


@pytest.mark.nightly
def test_media_influence_outputs_and_their_embeddings_count_as_zero(reference):
    time_axis = np.arange(16000, dtype=np.float32) / 16000
    tones = [np.sin(2 * np.pi * pitch * time_axis) for pitch in (220, 660)]
    picture = np.linspace(0, 255, 84 * 84 * 3).reshape(84, 84, 3).astype(np.uint8)
    pictures = [picture, np.ascontiguousarray(picture[::-1])]

    def ask(kind, **media):
        content = [{"type": kind}, {"type": "text", "text": "What is this?"}]
        return reference.generate(reference.inputs([{"role": "user", "content": content}], **media), speaks=False)

    heard = [ask("audio", audios=[(tone, 16000)]) for tone in tones]
    seen = [ask("image", images=[image]) for image in pictures]
    watched = [ask("video", videos=[np.stack([image, image // 2])]) for image in pictures]
    for first, second in (heard, seen, watched):
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.thinker_tokens != second.thinker_tokens
        assert first.codec_tokens != second.codec_tokens
    placeholders = torch.tensor(heard[0].prompt_token_ids) == reference.model.config.thinker_config.audio_token_index
    assert placeholders.sum() == 25  # one second
    # Normalised hidden states alone have a size of about 1 per element, with an embedding added about 1.4.
    sizes = heard[0].thinker_rows[: len(placeholders)].pow(2).mean(dim=1).sqrt()
    assert sizes[placeholders].mean() < 1.15 < sizes[~placeholders].mean()


def test_noise_is_injected(reference):
    first = answer(reference, "hello", seed=7, talker_max_tokens=16)
    frames = 2 * len(first.codec_tokens)
    same = answer(reference, "hello", noise=vocoder_noise(7, frames, 80), talker_max_tokens=16)
    other = answer(reference, "hello", seed=8, talker_max_tokens=16)
    assert torch.equal(first.waveform, same.waveform)
    assert not torch.allclose(first.waveform, other.waveform, atol=1e-2)
    with pytest.raises(ValueError, match="noise of shape"):
        answer(reference, "hello", noise=vocoder_noise(7, frames + 1, 80), talker_max_tokens=16)
