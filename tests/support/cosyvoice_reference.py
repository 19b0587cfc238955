"""The oracle for CosyVoice 2 in float32 on the CPU: transformers' Qwen2, and the vocoder of `minicpmo-utils`.

The package has the model's language model, too, but only for a GPU. What is here around transformers' layers is what
that and the model's public code do (`Qwen2LM.inference`), and around the package's networks of the vocoder it is what
that code does (`token2wav` and `tts` of `CosyVoice2Model`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import soundfile
import torch
from torch import nn
from transformers import AutoTokenizer, DynamicCache, Qwen2Config, Qwen2Model

from omni_actors.engine.models.s3_vocoder.hift import OverlapHift
from omni_actors.engine.models.s3_vocoder.runner import SEED
from omni_actors.engine.models.s3_vocoder.unet import UnetFlow
from omni_actors.engine.models.s3_vocoder.voices import RecordedVoice, VoiceEncoder
from omni_actors.engine.models.s3_vocoder.weights import Weights
from tests.support.reference import one_thread
from tests.support.s3_reference import import_package
from tools.checkpoints.cosyvoice import END, LAYERS
from tools.checkpoints.s3 import MELS, SPEAKER, UNET_HEAD

SPECIAL = "<|im_start|> <|im_end|> <|endofprompt|> [breath] <strong> </strong> [noise] [laughter] [cough] [clucking] "
SPECIAL += "[accent] [quick_breath] <laughter> </laughter> [hissing] [sigh] [vocalized-noise] [lipsmack] [mn]"


class CosyVoiceReference:
    """The talker of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / LAYERS / "config.json").read_text(encoding="utf-8"))
        self.weights = torch.load(folder / "llm.pt")
        self.layers = Qwen2Model(Qwen2Config(**config)).eval()
        name = "llm.model.model."
        self.layers.load_state_dict(
            {key.removeprefix(name): each for key, each in self.weights.items() if key.startswith(name)}
        )
        self.tokenizer = AutoTokenizer.from_pretrained(folder / LAYERS)
        self.tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL.split()})
        self._folder = folder
        self._encoder = VoiceEncoder(folder, "speech_tokenizer_v2.onnx")

    def voice(self, name: str) -> RecordedVoice:
        """A recording of the checkpoint."""
        return self._encoder(*soundfile.read(self._folder / "asset" / f"{name}.wav", dtype="float32"))

    @torch.no_grad()
    def speak(self, text: str, before: str = "", sounds: Sequence[int] = ()) -> list[int]:
        """S3 tokens, greedily, without the one that ends them.

        Args:
            before: what is said in the recording, or instructions with their mark.
            sounds: S3 tokens of the recording.
        """
        count, past = len(self.tokenizer(text)["input_ids"]), DynamicCache()
        made, rows = list[int](), self._prompt(text, before, sounds)
        while len(made) < 20 * count:
            scores = self._scores(rows, past)[-1]
            code = int(scores[: END if len(made) < 2 * count else None].argmax())
            if code >= END:
                break
            made.append(code)
            rows = self.weights["speech_embedding.weight"][[code]]
        return made

    @torch.no_grad()
    def likeliest(self, text: str, codes: Sequence[int], before: str = "", sounds: Sequence[int] = ()) -> list[int]:
        """The likeliest token at the place of each of these codes, and after them."""
        rows = torch.cat([self._prompt(text, before, sounds), self.weights["speech_embedding.weight"][[*codes]]])
        scores = self._scores(rows, None)[-len(codes) - 1 :]
        scores[: 2 * len(self.tokenizer(text)["input_ids"]), END:] = -torch.inf
        found: list[int] = scores.argmax(1).tolist()
        return found

    def _prompt(self, text: str, before: str, sounds: Sequence[int]) -> torch.Tensor:
        read = [*(self.tokenizer(before)["input_ids"] if before else []), *self.tokenizer(text)["input_ids"]]
        begin, speech = self.weights["llm_embedding.weight"].split(1)
        heard = self.weights["speech_embedding.weight"][[*sounds]]
        return torch.cat([begin, self.layers.embed_tokens.weight[read], speech, heard])

    def _scores(self, rows: torch.Tensor, past: DynamicCache | None) -> torch.Tensor:
        with one_thread():
            made = self.layers(inputs_embeds=rows[None], past_key_values=past, use_cache=past is not None)
        return made.last_hidden_state[0] @ self.weights["llm_decoder.weight"].T + self.weights["llm_decoder.bias"]


AHEAD, OVERLAP = 3, 8  # tokens, and mel frames


def second_ends(voice: RecordedVoice, *seconds: int) -> list[int]:
    """Where chunks end that have so many seconds together, the rest of the recording's last one and what follows it."""
    return [25 * second + -len(voice.tokens) % 25 for second in seconds]


class CosyVocoderReference:
    """The package's flow and HiFT, of the files in a folder. Their noise is ours, where they draw it anew.

    Args:
        sizes: those of the files.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        import_package()
        from stepaudio2.flashcosyvoice.modules.flow import CausalConditionalCFM, CausalMaskedDiffWithXvec
        from stepaudio2.flashcosyvoice.modules.flow_components import estimator, upsample_encoder
        from stepaudio2.flashcosyvoice.modules.hifigan import ConvRNNF0Predictor, HiFTGenerator

        width = sizes["width"]
        encoder = upsample_encoder.UpsampleConformerEncoder(
            width, width, sizes["heads"], sizes["between"], sizes["layers"]
        )
        # These are of the published sizes, whatever is asked for.
        encoder.pre_lookahead_layer = upsample_encoder.PreLookaheadLayer(width, AHEAD)
        encoder.up_layer = upsample_encoder.Upsample1D(width, width, 2)
        encoder.up_encoders = encoder.up_encoders[: sizes["wide_layers"]]
        with mock.patch.object(estimator, "LoRACompatibleLinear", nn.Linear):  # deprecated, and here the same
            unet = estimator.CausalConditionalDecoder(
                channels=[sizes["unet_width"]],
                attention_head_dim=UNET_HEAD,
                n_blocks=sizes["unet_layers"],
                num_mid_blocks=sizes["unet_stages"],
                num_heads=sizes["unet_heads"],
            )
        solver = CausalConditionalCFM(estimator=unet)
        self.flow = CausalMaskedDiffWithXvec(
            width, MELS, SPEAKER, vocab_size=sizes["tokens"], encoder=encoder, decoder=solver
        )
        self.flow.load_state_dict(torch.load(folder / "flow.pt"))
        self.flow.eval()
        self.hift = HiFTGenerator(
            base_channels=sizes["channels"], f0_predictor=ConvRNNF0Predictor(1, MELS, sizes["pitch"])
        )
        weights = torch.load(folder / "hift.pt")
        self.hift.load_state_dict({name.removeprefix("generator."): weight for name, weight in weights.items()})
        self.hift.eval()
        # In float32 the phase of its oscillator is wrong by more than what is compared here.
        oscillator = self.hift.m_source.l_sin_gen
        oscillator.register_forward_pre_hook(lambda _, given: (given[0].double(),))
        oscillator.register_forward_hook(lambda _module, _given, made: tuple(each.float() for each in made))
        self.flow_noise = UnetFlow(Weights.read(folder / "flow.pt"), SEED).noise.T[None]
        self.hift_noise = OverlapHift(Weights.read(folder / "hift.pt"), SEED).noise

    @torch.inference_mode()
    def stream(self, tokens: Sequence[int], ends: Sequence[int], voice: RecordedVoice) -> torch.Tensor:
        """Samples f32 of an utterance in chunks that end after so many tokens; none: as a whole."""
        cuts = [end for end in ends if end + AHEAD <= len(tokens)]
        sounds, mel, source, faded = list[torch.Tensor](), torch.zeros(1, MELS, 0), torch.zeros(1, 1, 0), torch.zeros(0)
        window, size = torch.hamming_window(2 * OVERLAP * 480, periodic=False), OVERLAP * 480
        for begin, end in zip([0, *cuts], [*cuts, None], strict=True):
            read = torch.tensor([[*voice.tokens, *(tokens if end is None else tokens[: end + AHEAD])]])
            with self._noise(lambda like: self.flow_noise[..., : like.shape[2]]):
                frames, _ = self.flow(
                    read,
                    torch.tensor([read.shape[1]]),
                    voice.mel[None],
                    torch.tensor([len(voice.mel)]),
                    voice.embedding[None],
                    streaming=end is not None,
                    finalize=end is None,
                )
            first = 2 * begin - mel.shape[2]
            mel = torch.cat([mel, frames[..., len(voice.mel) + 2 * begin :]], 2)
            places = (480 * first + torch.arange(480 * mel.shape[2])) % len(self.hift_noise)
            with self._noise(lambda like, places=places: self.hift_noise[places][None, :, : like.shape[2]]):
                sound, source = self.hift(mel, source)
            sound = sound[0].clone()
            if len(faded):
                sound[:size] = sound[:size] * window[:size] + faded * window[size:]
            sounds.append(sound if end is None else sound[:-size])
            mel, source, faded = mel[..., -OVERLAP:], source[..., -size:], sound[-size:]
        return torch.cat(sounds)

    @contextmanager
    def _noise(self, made: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        with one_thread(), mock.patch.object(torch, "randn_like", made):
            yield
