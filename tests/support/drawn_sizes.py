"""Seeds and sizes of tiny checkpoints: two of each family that are always the same, and two that each night draws."""

from __future__ import annotations

import os
from collections.abc import Mapping
from random import Random

import pytest

from tests.support.nightly import nightly
from tools.checkpoints.families import Sizes

NIGHT = os.environ.get("OMNI_TEST_SEED", "0")  # scripts/nightly.sh draws and prints it
# The argument is what seeds a `Random`, from which all of a test follows.
DRAWS = pytest.mark.parametrize("draw", ["1", *map(nightly, ("2", f"{NIGHT}.1", f"{NIGHT}.2"))])
WORDS = ("the tide", "is full", "hello", "a dog", "and a cat", "sail", "the sea", "w300", "w411", "of", "they", "1234")


def draw_text(generator: Random, words: range) -> str:
    """A text of so many words."""
    return " ".join(generator.choices(WORDS, k=generator.choice(words)))


def _heads(generator: Random) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    groups = generator.choice((1, 2, 3))
    return groups * generator.choice((1, 2)), groups


def qwen2_5_omni_sizes(generator: Random) -> Sizes:
    choice = generator.choice
    heads, kv_heads = _heads(generator)
    talker_heads, talker_kv_heads = _heads(generator)
    return dict(
        vocabulary=generator.randrange(480, 800),
        sounds=choice((64, 100, 200, 300)),
        head_width=choice((32, 64)),
        heads=heads,
        kv_heads=kv_heads,
        layers=choice((2, 3, 4)),
        between=choice((128, 192, 256)),
        talker_width=choice((64, 96, 128)),
        talker_heads=talker_heads,
        talker_kv_heads=talker_kv_heads,
        talker_layers=choice((2, 3, 4)),
        talker_between=choice((128, 192, 256)),
        dit_heads=choice((2, 3, 6)),
        dit_layers=choice((3, 4, 5)),
        dit_block=choice((12, 16, 24, 32)),
        channels=choice((64, 128, 192)),
    )


def qwen3_omni_sizes(generator: Random) -> Sizes:
    choice = generator.choice
    heads, kv_heads = _heads(generator)
    talker_heads, talker_kv_heads = _heads(generator)
    layers = choice((4, 5, 6))
    return dict(
        vocabulary=generator.randrange(480, 800),
        sounds=choice((64, 100, 200)),
        groups=choice((4, 8, 16)),
        head_width=choice((32, 64)),
        width=choice((96, 128, 160)),
        heads=heads,
        kv_heads=kv_heads,
        layers=layers,
        experts=choice((4, 8, 12)),
        chosen=choice((1, 2, 3)),
        states_layer=generator.randrange(3, layers),
        talker_width=choice((64, 96, 128)),
        talker_heads=talker_heads,
        talker_kv_heads=talker_kv_heads,
        talker_layers=choice((2, 3, 4)),
        talker_experts=choice((4, 8, 12)),
        talker_chosen=choice((1, 2, 3)),
        predictor_layers=choice((1, 2, 3)),
        decoder_width=choice((32, 64, 96)),
        decoder_heads=choice((2, 4)),
        decoder_layers=choice((1, 2, 3)),
        window=choice((4, 6, 12)),
        channels=choice((32, 64, 96)),
    )


def qwen3_tts_sizes(generator: Random) -> Sizes:
    choice = generator.choice
    heads, kv_heads = _heads(generator)
    width = choice((64, 96, 128))
    return dict(
        vocabulary=generator.randrange(480, 800),
        sounds=choice((64, 128, 256)),
        head_width=choice((32, 64)),
        width=width,
        text_width=choice((64, 96, 120)),
        heads=heads,
        kv_heads=kv_heads,
        layers=choice((2, 3, 4)),
        predictor_width=choice((width, 48, 80)),
        predictor_layers=choice((1, 2, 3)),
        decoder_width=choice((32, 48, 80)),
        decoder_heads=choice((2, 4)),
        decoder_layers=choice((1, 2, 3)),
        latent_width=choice((32, 64, 96)),
        window=choice((4, 6, 12)),
        channels=choice((32, 64, 96)),
    )


def qwen3_asr_sizes(generator: Random) -> Sizes:
    choice = generator.choice
    heads, kv_heads = _heads(generator)
    return dict(
        vocabulary=generator.randrange(480, 800),
        audio_layers=choice((1, 2, 3)),
        audio_heads=choice((2, 4)),
        audio_width=choice((32, 64, 96)),
        audio_window=choice((100, 200, 400)),
        head_width=choice((32, 64)),
        width=choice((64, 96, 128)),
        heads=heads,
        kv_heads=kv_heads,
        layers=choice((2, 3, 4)),
    )


def z_image_sizes(generator: Random) -> Sizes:
    choice = generator.choice
    heads, kv_heads = _heads(generator)
    return dict(
        channels=choice((4, 8, 16)),
        heads=choice((2, 3, 4)),
        axes=choice(((8, 12, 12), (16, 24, 24))),
        layers=choice((2, 3, 4)),
        refiners=choice((1, 2)),
        vae_widths=choice(((8, 8, 16, 16), (8, 16, 16, 32))),
        text_width=choice((64, 96, 128)),
        text_heads=heads,
        text_kv_heads=kv_heads,
        text_layers=choice((2, 3, 4)),
    )


def qwen_image_sizes(generator: Random) -> Sizes:
    choice = generator.choice
    heads, kv_heads = _heads(generator)
    return dict(
        channels=choice((8, 16, 24)),
        heads=choice((2, 3, 4)),
        axes=choice(((8, 12, 12), (16, 24, 24))),
        layers=choice((2, 3, 4)),
        vae_width=choice((4, 8, 12)),
        text_width=choice((64, 96, 128)),
        text_heads=heads,
        text_kv_heads=kv_heads,
        text_layers=choice((3, 4, 5)),
        vision_width=choice((32, 64)),
        vision_heads=choice((2, 4)),
    )


def flux2_sizes(generator: Random) -> Sizes:
    choice = generator.choice
    heads, kv_heads = _heads(generator)
    latent_channels = choice((4, 8))
    return dict(
        channels=4 * latent_channels,
        latent_channels=latent_channels,
        heads=choice((2, 3, 4)),
        axes=choice(((8, 8, 8, 8), (4, 12, 12, 4), (16, 16, 16, 16))),
        layers=choice((1, 2, 3)),
        single_layers=choice((1, 2, 4)),
        vae_widths=choice(((8, 8, 16, 16), (8, 16, 16, 32))),
        text_width=choice((64, 96, 128)),
        text_heads=heads,
        text_kv_heads=kv_heads,
        text_layers=choice((28, 29, 31)),
    )


def cosyvoice2_sizes(generator: Random) -> Sizes:
    choice = generator.choice
    heads, kv_heads = _heads(generator)
    return dict(
        width=heads * choice((32, 64)),
        between=choice((128, 192, 256)),
        layers=choice((2, 3, 4)),
        heads=heads,
        kv_heads=kv_heads,
        sounds=choice((40, 60, 200)),
    )


def s3_sizes(generator: Random) -> Mapping[str, int]:
    """Of a vocoder; see `tools.checkpoints.s3`."""
    choice = generator.choice
    heads = choice((2, 3, 4))
    return dict(
        tokens=200,
        width=heads * choice((8, 16)),
        layers=choice((1, 2, 3)),
        wide_layers=choice((1, 2)),
        heads=heads,
        between=choice((32, 48)),
        channels=choice((32, 48, 64)),
        pitch=choice((16, 24)),
        unet_width=choice((16, 32, 48)),
        unet_heads=choice((1, 2, 3)),
        unet_stages=choice((1, 2, 3)),
        unet_layers=choice((1, 2)),
    )
