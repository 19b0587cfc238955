"""The oracle for MiniCPM-o 4.5, of transformers' Qwen3, Whisper, SigLip and Llama, in float32 on the CPU.

No package has the model. What is here besides those is what its public code does between them (`chat`,
`get_audio_embedding`, `get_vision_embedding`, `Resampler`, `streaming_generate` and `TTSStreamingGenerator` with
`full_attention`), compared with it by hand.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import omni_actors.engine.models.minicpm_o.config  # noqa: F401 - registers configuration and tokenizer
from tests.support.reference import one_thread
from tools.checkpoints.minicpm import own_settings, resampler, talker_config
from tools.checkpoints.s3 import DIRECTION, GAIN

ENDING = {60: 5.0}  # makes the tiny checkpoint end parts of a speech, after ten codes or thirty


@dataclass(frozen=True)
class MiniCpmAnswer:
    """Token ids of a prompt and its answer, the talker's rows of the answer, f32 [n, width], and its S3 tokens."""

    prompt: list[int]
    answer: list[int]
    rows: torch.Tensor
    codes: list[int]


@dataclass(frozen=True)
class SlicedPicture:
    """A picture, and the sizes that the model's own code gave it and its slices, found by hand.

    Args:
        whole: width and height.
        slice: likewise, of each.
    """

    picture: Image.Image
    whole: tuple[int, int]
    columns: int = 0
    rows: int = 0
    slice: tuple[int, int] = (0, 0)

    def parts(self) -> list[Image.Image]:
        """The whole, and then the slices, row by row."""
        wide, tall = self.slice
        found = [self.picture.resize(self.whole, Image.Resampling.BICUBIC)]
        if self.columns:
            fine = self.picture.resize((wide * self.columns, tall * self.rows), Image.Resampling.BICUBIC)
            for row in range(self.rows):
                for column in range(self.columns):
                    box = (column * wide, row * tall, (column + 1) * wide, (row + 1) * tall)
                    found.append(fine.crop(box))
        return found


@dataclass(frozen=True)
class ReferenceFilm:
    """A video as `get_video_frame_audio_segments` of the package minicpmo-utils cuts it.

    Args:
        frames: of each second, not sliced.
        sounds: of each second; none for a silent video.
    """

    frames: list[SlicedPicture]
    sounds: list[np.ndarray]


class MiniCpmReference:
    """Thinker and talker of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.thinker = Qwen3ForCausalLM(Qwen3Config(**own_settings(config))).eval()
        self.thinker.load_state_dict(_part(weights, "llm."))
        self.hearing = WhisperEncoder(WhisperConfig(**config["audio_config"])).eval()
        self.hearing.load_state_dict(_part(weights, "apm."))
        self.heard = _part(weights, "audio_projection_layer.")
        self.seeing = SiglipVisionModel(SiglipVisionConfig(**config["vision_config"], vision_use_head=False)).eval()
        self.seeing.load_state_dict(_part(weights, "vpm."))
        self.resampler = resampler(config)
        self.resampler.load_state_dict(_part(weights, "resampler."))
        self.extractor = WhisperFeatureExtractor()
        self.talker = LlamaModel(talker_config(config)).eval()
        self.talker.load_state_dict(_part(weights, "tts.model."), strict=False)
        self.speech = _part(weights, "tts.")
        self.settings = config["tts_config"]
        name = "head_code.0."
        gain, direction = (self.speech[name + part] for part in (GAIN, DIRECTION))
        self.head = gain * direction / direction.norm(dim=1, keepdim=True)

    @torch.no_grad()
    def answer(
        self, text: str, tokens: int, codes: int, *media: np.ndarray | SlicedPicture | ReferenceFilm
    ) -> MiniCpmAnswer:
        """Answers greedily: so many tokens of text, of which the last is not spoken, and so many of speech.

        Args:
            text: of the user, after the media.
            media: sounds, f32 at 16 kHz, pictures and videos. Without a sound the mark of speech is the caller's wish.
        """
        with one_thread():
            embedded, places, pictures, joint = [], [], 0, "\n"
            for medium in media:
                if isinstance(medium, SlicedPicture):
                    embedded.append(self.see(medium))
                    slices = "\n".join([f"<slice>{'<unk>' * 64}</slice>" * medium.columns] * medium.rows)
                    places.append(f"<image_id>{pictures}</image_id><image>{'<unk>' * 64}</image>{slices}")
                    pictures += 1
                elif isinstance(medium, ReferenceFilm):
                    joint = ""
                    heard = self.hear(np.concatenate(medium.sounds)) if medium.sounds else torch.zeros(0)
                    for second, frame in enumerate(medium.frames):
                        places.append(f"<image>{'<unk>' * 64}</image>")
                        embedded.append(self.see(frame))
                        if medium.sounds:
                            count = ((math.ceil(len(medium.sounds[second]) / 160) - 1) // 2 + 1) // 5
                            places.append(f"<|audio_start|>{'<unk>' * count}<|audio_end|>")
                            embedded.append(heard[:count])
                            heard = heard[count:]
                else:
                    embedded.append(self.hear(medium))
                    places.append(f"<|audio_start|>{'<unk>' * len(embedded[-1])}<|audio_end|>")
            prompt = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": joint.join([*places, text] if text else places)}],
                add_generation_prompt=True,
                enable_thinking=False,
                use_tts_template=True,
                return_dict=False,
            )
            embed = self.thinker.model.embed_tokens
            given = embed(torch.tensor(prompt))
            if media:
                given[torch.tensor(prompt) == self.tokenizer.convert_tokens_to_ids("<unk>")] = torch.cat(embedded)
            made = self.thinker.generate(inputs_embeds=given[None], do_sample=False, max_new_tokens=tokens)
            answer = made[0].tolist()
            whole = torch.cat([given, embed(torch.tensor(answer))])
            states = self.thinker.model(inputs_embeds=whole[None]).last_hidden_state[0, len(prompt) : -1]
            rows = self.rows(torch.tensor(answer[:-1]), states)
            return MiniCpmAnswer(prompt, answer, rows, self.speak(rows, codes))

    @torch.no_grad()
    def hear(self, sound: np.ndarray) -> torch.Tensor:
        """What the encoder makes of a sound [n, width], half a minute at a time."""
        return torch.cat([self._hear(sound[begin : begin + 480_000]) for begin in range(0, len(sound), 480_000)])

    def _hear(self, sound: np.ndarray) -> torch.Tensor:
        """Each second attends to itself and to those before it."""
        made = self.extractor(sound, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
        frames = int(made["attention_mask"].sum())
        encoder = self.hearing
        hidden = F.gelu(encoder.conv2(F.gelu(encoder.conv1(made["input_features"][:, :, :frames])))).transpose(1, 2)
        count = hidden.shape[1]
        hidden = hidden + encoder.embed_positions.weight[:count]
        mask = torch.full((1, 1, count, count), -torch.inf)
        for place in range(count):
            mask[..., place, : (place // 50 + 1) * 50] = 0
        for layer in encoder.layers:
            hidden = layer(hidden, mask)
        heard = self.heard
        inner = F.relu(F.linear(encoder.layer_norm(hidden)[0], heard["linear1.weight"], heard["linear1.bias"]))
        projected = F.linear(inner, heard["linear2.weight"], heard["linear2.bias"])
        return torch.stack([part.mean(dim=0) for part in projected.split(5) if len(part) == 5])

    @torch.no_grad()
    def see(self, picture: SlicedPicture) -> torch.Tensor:
        """What encoder and resampler make of a picture and its slices [64 n, width]."""
        return torch.cat([self._see(part) for part in picture.parts()])

    def _see(self, picture: Image.Image) -> torch.Tensor:
        pixels = (torch.from_numpy(np.asarray(picture, np.float32)) / 255 - 0.5) / 0.5
        model, made = self.seeing, self.resampler
        hidden = model.embeddings.patch_embedding(pixels.permute(2, 0, 1)[None])
        _, _, rows, columns = hidden.shape
        side = model.config.image_size // model.config.patch_size
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        down, across = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / torch.tensor(size)), bounds, right=True)
            for size in (rows, columns)
        )
        places = model.embeddings.position_embedding.weight.view(side, side, -1)[down][:, across]
        hidden = hidden.flatten(2).transpose(1, 2) + places.flatten(0, 1)
        for layer in model.encoder.layers:
            hidden = layer(hidden, attention_mask=None)
        values = made["ln_kv"](made["kv_proj"](model.post_layernorm(hidden)[0]))
        width = values.shape[1]
        rates = 10_000.0 ** -(torch.arange(width // 4) / (width / 4))
        angles = [torch.arange(size)[:, None] * rates for size in (columns, rows)]
        x, y = (torch.cat([each.sin(), each.cos()], dim=1) for each in angles)
        grid = torch.cat([x.expand(rows, -1, -1), y[:, None].expand(-1, columns, -1)], dim=2)
        queries = made["ln_q"](made.query)
        seen, _ = made["attn"](queries, values + grid.flatten(0, 1), values, need_weights=False)
        return made["ln_post"](seen) @ made.proj

    def rows(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What the talker's layers take of tokens and their hidden states."""
        speech = self.speech
        hidden = F.relu(
            F.linear(states, speech["projector_semantic.linear1.weight"], speech["projector_semantic.linear1.bias"])
        )
        hidden = F.linear(
            hidden, speech["projector_semantic.linear2.weight"], speech["projector_semantic.linear2.bias"]
        )
        return speech["emb_text.weight"][tokens] + F.normalize(hidden, dim=-1)

    @torch.no_grad()
    def speak(self, rows: torch.Tensor, count: int) -> list[int]:
        """So many S3 tokens, greedily, with the bias `ENDING`; the last part does not end before."""
        text_end, begin = self.speech["emb_text.weight"][
            [self.settings["text_eos_token_id"], self.settings["audio_bos_token_id"]]
        ].split(1)
        conditions = list(rows.split(10))
        last = len(conditions) - 1
        conditions[last] = torch.cat([conditions[last], text_end])
        inputs, codes = rows[:0], list[int]()
        for number, condition in enumerate(conditions):
            inputs = torch.cat([inputs, condition, begin])
            while len(codes) < count:
                hidden = self.talker(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0, -1]
                logits = self.head @ hidden
                for code, bias in ENDING.items():
                    logits[code] = -torch.inf if number == last else logits[code] + bias
                code = int(logits.argmax())
                if code in ENDING:
                    break
                codes.append(code)
                inputs = torch.cat([inputs, self.speech["emb_code.0.weight"][codes[-1:]]])
        return codes


def _part(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
