"""The oracle itself: its answers vary, and it keeps what transformers would lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.reference import Reference, ReferenceResult, one_thread, vocoder_noise
from tools.checkpoints.measure import failed_checks, measure_answers

PROMPTS = ("hello", "What is the capital of France?", "Tell me a story about a dog.")
VOICES = ("Chelsie", "Ethan")


@pytest.fixture(scope="module")
def answers(reference: Reference) -> dict[tuple[str, str], ReferenceResult]:
    """Only the first prompt's are spoken: `test_the_promised_figures` listens to all of them."""
    return {
        (prompt, voice): answer(reference, prompt, voice=voice, speaks=prompt == PROMPTS[0])
        for prompt in PROMPTS
        for voice in VOICES
    }


def answer(reference: Reference, prompt: str, **options) -> ReferenceResult:
    return reference.generate(reference.inputs([{"role": "user", "content": prompt}]), **options)


@pytest.mark.parametrize("voice", VOICES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_outputs_vary(answers, prompt, voice):
    result = answers[prompt, voice]
    assert len(result.thinker_tokens) == 32
    assert len(set(result.thinker_tokens)) >= 10
    assert len(result.codec_tokens) == 64
    assert len(set(result.codec_tokens)) >= 10
    if prompt == PROMPTS[0]:
        assert 0.05 < result.waveform.abs().max() < 0.95
        assert result.waveform.shape == (64 * 480,)


def test_the_promised_figures(tiny_checkpoint):
    """What the command line checks after writing: texts in both voices, and audio, images, video."""
    with one_thread():
        answers = measure_answers(tiny_checkpoint)
    assert failed_checks(answers) == []
    # float32 rounding moves a logit by up to 6e-5; a gap of that size could flip a token between two implementations.
    assert min(min(answer.thinker_gap, answer.codec_gap) for answer in answers) > 2e-4


def test_prompts_and_voices_influence_outputs(answers):
    for voice in VOICES:
        assert len({tuple(answers[prompt, voice].thinker_tokens[:4]) for prompt in PROMPTS}) == len(PROMPTS)
    assert len({tuple(result.codec_tokens) for result in answers.values()}) == len(answers)
    for prompt in PROMPTS:
        first, second = (answers[prompt, voice] for voice in VOICES)
        assert first.thinker_tokens == second.thinker_tokens


def test_shapes_of_what_the_stages_exchange(reference, answers):
    for result in answers.values():
        prompt, width = len(result.prompt_token_ids), reference.model.config.talker_config.embedding_size
        assert result.thinker_rows.shape == (prompt + 32 - 1, width)
        assert result.talker_prompt_embeds.shape == (prompt + 2, width)


def test_rows_are_hidden_state_plus_embedding(reference, answers):
    """An independent computation: one forward pass over prompt and reply."""
    result = answers["hello", "Chelsie"]
    ids = torch.tensor([result.prompt_token_ids + result.thinker_tokens[:-1]])
    with torch.no_grad():
        output = reference.model.thinker(input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    rows = output.hidden_states[-1][0] + output.hidden_states[0][0]
    torch.testing.assert_close(result.thinker_rows, rows, atol=1e-4, rtol=1e-4)


def test_talker_prompt_has_the_codec_tokens(reference, answers):
    """What transformers 5.19 loses with the mask: pad and start of the codec in the last two rows."""
    result, config = answers["hello", "Ethan"], reference.model.config.talker_config
    prompt = len(result.prompt_token_ids)
    text, codec = reference.model.thinker.get_input_embeddings(), reference.model.talker.get_input_embeddings()
    voice_row = text.weight[reference.voices["Ethan"]["bos_token"]] + codec.weight[config.tts_codec_pad_token_id]
    reply_row = result.thinker_rows[prompt] + codec.weight[config.tts_codec_start_token_id]
    torch.testing.assert_close(result.talker_prompt_embeds[:prompt], result.thinker_rows[:prompt])
    torch.testing.assert_close(result.talker_prompt_embeds[prompt], voice_row)
    torch.testing.assert_close(result.talker_prompt_embeds[prompt + 1], reply_row)


def test_media_influence_outputs_and_their_embeddings_count_as_zero(reference):
    time_axis = np.arange(16000, dtype=np.float32) / 16000
    tones = [np.sin(2 * np.pi * pitch * time_axis) for pitch in (220, 660)]
    picture = np.linspace(0, 255, 84 * 84 * 3).reshape(84, 84, 3).astype(np.uint8)
    pictures = [picture, np.ascontiguousarray(picture[::-1])]

    def ask(kind: str, **media) -> ReferenceResult:
        content = [{"type": kind}, {"type": "text", "text": "What is this?"}]
        return reference.generate(reference.inputs([{"role": "user", "content": content}], **media), speaks=False)

    heard = [ask("audio", audios=[(tone, 16000)]) for tone in tones]
    seen = [ask("image", images=[image]) for image in pictures]
    watched = [ask("video", videos=[np.stack([image, image // 2])]) for image in pictures]
    for first, second in (heard, seen, watched):
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.thinker_tokens != second.thinker_tokens
        assert first.codec_tokens != second.codec_tokens

    config = reference.model.config.thinker_config
    placeholders = torch.tensor(heard[0].prompt_token_ids) == config.audio_token_index
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


def test_end_tokens(reference, answers):
    whole = answers["hello", "Chelsie"]
    text_end, codec_end = whole.thinker_tokens[9], whole.codec_tokens[20]
    result = answer(reference, "hello", thinker_eos=[text_end], speaks=False)
    assert result.thinker_tokens == whole.thinker_tokens[: whole.thinker_tokens.index(text_end) + 1]
    result = answer(reference, "hello", talker_eos=[codec_end], speaks=False)
    assert result.talker_tokens[-1] == codec_end
    assert result.codec_tokens == result.talker_tokens[:-1] == whole.codec_tokens[: whole.codec_tokens.index(codec_end)]
    result = answer(reference, "hello", thinker_eos=[], talker_eos=[], speaks=False)
    assert result.thinker_tokens == whole.thinker_tokens
    assert result.talker_tokens == result.codec_tokens == whole.codec_tokens


def test_audio_at_another_rate_is_refused(reference):
    with pytest.raises(ValueError, match="resample"):
        reference.inputs("<|audio_bos|><|AUDIO|><|audio_eos|>", audios=[(np.zeros(44100, np.float32), 44100)])
