"""The oracle for Qwen3-Omni: what transformers answers, in float32 on the CPU, with everything the stages exchange."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.reference import GREEDY, OmniReference, end_tokens, one_thread, recorded
from tools.checkpoints.reference import voices_of


@dataclass(frozen=True)
class Qwen3Result:
    """One answer, with what passes between the stages.

    P is the prompt length, T the number of thinker tokens, M the number of media positions in the prompt, H the
    thinker's hidden size, F the number of frames.
    """

    prompt_token_ids: list[int]
    """[P], media placeholders expanded."""
    thinker_tokens: list[int]
    """[T], with the token that ended the reply, if one did."""
    media_rows: torch.Tensor
    """[M, H]: hidden states of layer `accept_hidden_layer` at the prompt's media positions."""
    mrope_positions: torch.Tensor
    """[3, P] i64: the thinker's positions of the prompt."""
    codes: torch.Tensor
    """[F, 16] i64."""
    waveform: torch.Tensor
    """[samples] float32 at 24 kHz, one decode of all frames: 1920 F - 555; empty if there is none."""


class Qwen3Reference(OmniReference):
    """That of Qwen3-Omni."""

    processor_class = "Qwen3OmniMoeProcessor"

    def __init__(self, checkpoint_dir: str | Path) -> None:
        super().__init__(checkpoint_dir)
        self.voices = voices_of(self.model)

    def generate(
        self,
        inputs: dict[str, Any],
        *,
        voice: str = "Ethan",
        thinker_max_tokens: int = 32,
        talker_max_tokens: int = 24,
        thinker_sampling: dict[str, Any] = GREEDY,
        talker_sampling: dict[str, Any] = GREEDY,
        thinker_eos: Sequence[int] | None = None,
        talker_eos: Sequence[int] | None = None,
        use_audio_in_video: bool = False,
        speaks: bool = True,
    ) -> Qwen3Result:
        """Runs the whole model on one prompt; without the talker and what follows if `speaks` is false.

        The reply ends with the checkpoint's end tokens unless others are given; an empty list means that only the
        length limit ends it. A speaking reply needs two thinker tokens.
        """
        model, config = self.model, self.model.config
        prompt_length = inputs["input_ids"].shape[1]
        thinker_ends = end_tokens(thinker_eos, list(model.generation_config.eos_token_id))
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            thinker_results = stack.enter_context(recorded(model.thinker, "generate"))
            waveforms = stack.enter_context(_silenced(model.code2wav))
            model.generate(
                **inputs,
                speaker=voice,
                use_audio_in_video=use_audio_in_video,
                return_audio=speaks,
                thinker_max_new_tokens=thinker_max_tokens,
                thinker_eos_token_id=thinker_ends,
                talker_max_new_tokens=talker_max_tokens,
                talker_eos_token_id=end_tokens(talker_eos, [config.talker_config.codec_eos_token_id]),
                **{f"thinker_{name}": value for name, value in thinker_sampling.items()},
                **{f"talker_{name}": value for name, value in talker_sampling.items()},
                **({} if speaks else {"thinker_output_hidden_states": True, "thinker_return_dict_in_generate": True}),
            )
            codes = waveforms[0][0].T if speaks else torch.empty(0, 16, dtype=torch.int64)
            waveform = model.code2wav(waveforms[0])[0, 0] if speaks and len(codes) else torch.empty(0)
        thinker = thinker_results[0]
        ids = inputs["input_ids"][0]
        media = torch.isin(ids, torch.tensor([getattr(config.thinker_config, name) for name in MEDIA_IDS]))
        states = thinker.hidden_states[0][config.talker_config.accept_hidden_layer][0]
        return Qwen3Result(
            prompt_token_ids=ids.tolist(),
            thinker_tokens=thinker.sequences[0, prompt_length:].tolist(),
            media_rows=states[media],
            mrope_positions=self.positions(inputs, use_audio_in_video=use_audio_in_video),
            codes=codes,
            waveform=waveform,
        )

    def positions(self, inputs: dict[str, Any], *, use_audio_in_video: bool = False) -> torch.Tensor:
        """Returns the thinker's positions i64 [3, P] of a prompt."""
        mask = inputs.get("feature_attention_mask")
        positions, _ = self.model.thinker.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs.get("video_grid_thw"),
            inputs["attention_mask"],
            use_audio_in_video,
            None if mask is None else mask.sum(-1),
            inputs.get("video_second_per_grid"),
        )
        return positions[:, 0].to(torch.int64)


MEDIA_IDS = ("audio_token_id", "image_token_id", "video_token_id")


@contextmanager
def _quiet() -> Iterator[None]:
    """Runs the block without gradients, on one thread, and without a warning of transformers that does not apply."""
    with one_thread(), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Passing `repetition_penalty`")
        yield


@contextmanager
def _silenced(code2wav: Any) -> Iterator[list[torch.Tensor]]:
    """Collects the codes [1, 16, F] that transformers would decode in pieces, and decodes none of them."""
    given: list[torch.Tensor] = []

    def collect(codes: torch.Tensor, **_options: Any) -> torch.Tensor:
        given.append(codes)
        return torch.zeros(1, 1, 0)

    code2wav.chunked_decode = collect
    try:
        yield given
    finally:
        del code2wav.chunked_decode  # uncovers the method of the class
