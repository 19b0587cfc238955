"""The oracle: what transformers' Qwen2.5-Omni answers, in float32 on the CPU, with everything the stages exchange.

The reference is the published behaviour, which transformers 5.19 misses in one place: its `generate()` drops the
talker's attention mask and with it the embeddings of the codec's pad and start tokens. The mask is kept here, see
`tools.checkpoints.reference.keep_talker_attention_mask`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tools.checkpoints.reference import AUDIO_RATE, generate_arguments, load_reference_model, quiet_transformers

GREEDY: dict[str, Any] = {"do_sample": False}


def vocoder_noise(seed: int, frames: int, mel_dim: int, block: int = 24) -> torch.Tensor:
    """Returns the initial noise of the vocoder, [1, frames, mel_dim] float32; there are 2 frames per codec token.

    The serving code draws it in the same way, so equal seeds give equal waveforms: block after block, so that the noise
    of a shorter reply is the beginning of that of a longer one.

    Args:
        block: frames that are drawn at a time, a block of the DiT.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = [torch.randn([block, mel_dim], generator=generator) for _ in range(-(-frames // block))]
    return torch.cat(blocks)[None, :frames]


@dataclass(frozen=True)
class ReferenceResult:
    """One answer, with what passes between the stages.

    P is the prompt length, T the number of thinker tokens, H the thinker's hidden size.
    """

    prompt_token_ids: list[int]
    """[P], media placeholders expanded."""
    thinker_tokens: list[int]
    """[T], with the token that ended the reply, if one did."""
    thinker_rows: torch.Tensor
    """[P + T - 1, H]: last hidden state plus input embedding of every position the thinker has computed; the embedding
    counts as zero at audio, image and video positions of the prompt."""
    codec_tokens: list[int]
    """What goes to the vocoder: all that the talker sampled up to the first end token."""
    waveform: torch.Tensor
    """[samples] float32 at 24 kHz, 480 samples per codec token; empty if it was not to speak."""


class InjectedNoise(TorchFunctionMode):
    """While active, `torch.randn` returns the vocoder's noise instead of drawing from the global random state.

    transformers draws it inside `sample()` without taking a generator or a tensor. This mode changes nothing outside
    its `with` block and its thread.
    """

    def __init__(self, noise_for: Callable[[int, int], torch.Tensor]) -> None:
        super().__init__()
        self.noise_for = noise_for
        self.drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.randn:
            return func(*args, **(kwargs or {}))
        self.drawn += 1
        shape = tuple(args[0])
        noise = self.noise_for(shape[1], shape[2])
        if tuple(noise.shape) != shape:
            raise ValueError(f"the vocoder needs noise of shape {shape}, got {tuple(noise.shape)}")
        return noise.clone()


@contextmanager
def recorded(owner: Any, method: str) -> Iterator[list[Any]]:
    """Collects what a method of one object returns, while the block runs."""
    original = getattr(owner, method)
    results: list[Any] = []

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        results.append(original(*args, **kwargs))
        return results[-1]

    setattr(owner, method, call)
    try:
        yield results
    finally:
        delattr(owner, method)  # uncovers the method of the class


class _Silence(Exception):
    """Ends transformers' `generate()` where its vocoder would begin."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs the block on one thread: the model is tiny, and threads that wait for each other are slow when busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class OmniReference:
    """transformers' model and processor of one checkpoint folder.

    Attributes:
        processor_class: of transformers.
    """

    processor_class: ClassVar[str]

    def __init__(self, checkpoint_dir: str | Path) -> None:
        import transformers

        quiet_transformers()
        self.checkpoint_dir = Path(checkpoint_dir)
        self.processor = getattr(transformers, self.processor_class).from_pretrained(self.checkpoint_dir)
        self.model = load_reference_model(self.checkpoint_dir)

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """Returns the prompt text of chat messages, media as single placeholders."""
        return self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    def inputs(
        self,
        messages_or_text: list[dict[str, Any]] | str,
        audios: Sequence[np.ndarray | tuple[np.ndarray, int]] = (),
        images: Sequence[Any] = (),
        videos: Sequence[np.ndarray] = (),
        **processing: Any,
    ) -> dict[str, Any]:
        """Returns the processor's output for chat messages, or for a text that is already a whole prompt.

        `audios` are mono float samples at 16 kHz, with this rate or without, `images` PIL or HWC uint8, `videos` THWC
        uint8. With `use_audio_in_video=True` an audio belongs to each video.
        """
        text = messages_or_text if isinstance(messages_or_text, str) else self.prompt(messages_or_text)
        pairs = [audio if isinstance(audio, tuple) else (audio, AUDIO_RATE) for audio in audios]
        assert all(rate == AUDIO_RATE for _, rate in pairs), "to be resampled first"
        named = {"audio": [samples for samples, _ in pairs], "images": list(images), "videos": list(videos)}
        media = {name: items for name, items in named.items() if items}
        return dict(self.processor(text=text, **media, **processing, return_tensors="pt"))


class Reference(OmniReference):
    """That of Qwen2.5-Omni."""

    processor_class = "Qwen2_5OmniProcessor"

    @property
    def voices(self) -> Any:
        return self.model.speaker_map

    def generate(
        self,
        inputs: dict[str, Any],
        *,
        voice: str = "Chelsie",
        thinker_max_tokens: int = 32,
        talker_max_tokens: int = 64,
        seed: int = 0,
        num_steps: int = 10,
        guidance_scale: float = 0.5,
        thinker_sampling: dict[str, Any] = GREEDY,
        talker_sampling: dict[str, Any] = GREEDY,
        thinker_eos: Sequence[int] | None = None,
        talker_eos: Sequence[int] | None = None,
        use_audio_in_video: bool = False,
        speaks: bool = True,
    ) -> ReferenceResult:
        """Runs the whole model on one prompt; without its vocoder, which takes most of the time, if `speaks` is false.

        The sampling arguments go to transformers' `generate()`. The reply ends with the configured end tokens unless
        others are given; an empty list means that only the length limit ends it. Raises ValueError for
        `thinker_max_tokens` < 2: transformers has no talker input then. (A reply of one token fails inside transformers
        for the same reason.)
        """
        if thinker_max_tokens < 2:
            raise ValueError("the talker needs two thinker tokens")
        model, talker, vocoder = self.model, self.model.talker, self.model.token2wav
        noise_mode = InjectedNoise(lambda *shape: self.noise(seed, *shape))
        talker_calls: list[dict[str, Any]] = []
        vocoder_codes: list[torch.Tensor] = []

        def keep_talker_call(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if not talker_calls:  # the first call gets the prompt; forward() then changes its embeddings in place
                names = ("inputs_embeds", "thinker_reply_part")
                talker_calls.append({name: kwargs[name].clone() for name in names})

        def keep_codes(module: Any, args: Any) -> None:
            vocoder_codes.append(args[0])
            if not speaks:
                raise _Silence

        waveform = torch.empty(0)
        with ExitStack() as stack:
            stack.enter_context(one_thread())
            stack.enter_context(noise_mode)
            thinker_results = stack.enter_context(recorded(model.thinker, "generate"))
            for hook in (
                talker.register_forward_pre_hook(keep_talker_call, with_kwargs=True),
                vocoder.register_forward_pre_hook(keep_codes),
            ):
                stack.callback(hook.remove)
            with suppress(_Silence):
                _, waveform = model.generate(
                    **generate_arguments(inputs),
                    speaker=voice,
                    use_audio_in_video=use_audio_in_video,
                    thinker_max_new_tokens=thinker_max_tokens,
                    thinker_eos_token_id=self._thinker_eos(thinker_eos),
                    talker_max_new_tokens=talker_max_tokens,
                    talker_eos_token_id=self._talker_eos(talker_eos),
                    token2wav_num_steps=num_steps,
                    token2wav_guidance_scale=guidance_scale,
                    **{f"thinker_{name}": value for name, value in thinker_sampling.items()},
                    **{f"talker_{name}": value for name, value in talker_sampling.items()},
                )
        if noise_mode.drawn != speaks:
            raise RuntimeError(f"transformers drew noise {noise_mode.drawn} times instead of {speaks:d}")

        prompt_length = inputs["input_ids"].shape[1]
        prompt_embeds, reply_part = talker_calls[0]["inputs_embeds"][0], talker_calls[0]["thinker_reply_part"][0]
        # The talker's prompt is [prompt rows, voice, first reply row]; its reply part ends with text end and text pad.
        rows = torch.cat([prompt_embeds[:prompt_length], prompt_embeds[prompt_length + 1 :], reply_part[:-2]])
        return ReferenceResult(
            prompt_token_ids=inputs["input_ids"][0].tolist(),
            thinker_tokens=thinker_results[0].sequences[0, prompt_length:].tolist(),
            thinker_rows=rows,
            codec_tokens=vocoder_codes[0][0].tolist(),
            waveform=waveform,
        )

    def noise(self, seed: int, frames: int, mel_dim: int) -> torch.Tensor:
        """`vocoder_noise` of this checkpoint."""
        return vocoder_noise(seed, frames, mel_dim, self.model.config.token2wav_config.dit_config.block_size)

    def _thinker_eos(self, given: Sequence[int] | None) -> list[int]:
        config = self.model.config.thinker_config
        return end_tokens(given, [config.eos_token_id, config.pad_token_id])

    def _talker_eos(self, given: Sequence[int] | None) -> list[int]:
        config = self.model.config.talker_config
        return end_tokens(given, [config.tts_codec_pad_token_id, config.tts_codec_end_token_id])


def end_tokens(given: Sequence[int] | None, default: list[int]) -> list[int]:
    """Returns the ids that end a reply; -1, which is never sampled, stands for none, since transformers needs one."""
    if given is None:
        return default
    return list(given) or [-1]
