"""Checkpoints of Z-Image, Qwen-Image-2.1 and FLUX.2 klein, in the folders of the published ones (extra `image`).

A latent pixel is 8 pixels wide in Z-Image and 16 in the others, as published; Qwen-Image's pictures have four channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tools.checkpoints import claim_folder, write_json
from tools.checkpoints.families import Family, Sizes
from tools.checkpoints.omni import QWEN2_5_OMNI, QWEN3_OMNI
from tools.checkpoints.tokenizer import make_tokenizer
from tools.checkpoints.weights import drawn


def _derive(sizes: Sizes) -> dict[str, Any]:
    head_width, channels = sum(sizes["axes"]), sizes["channels"]
    return {
        "head_width": head_width,
        "width": sizes["heads"] * head_width,
        "states_width": 3 * sizes["text_width"],
        "means": [0.1 * index - 0.8 for index in range(channels)],
        "spreads": [1.0 + 0.1 * index for index in range(channels)],
    }


class PictureFamily:
    """Writes the checkpoints of a picture model, and makes its parts for tests.

    Args:
        name: of the family.
        omni: the family with the same tokens.
    """

    def __init__(self, name: str, omni: Family) -> None:
        self.name, self.omni = name.replace("_", "-"), omni
        self.family = Family(name, _derive)
        self.tiny = self.family.tiny
        self._options: dict[str, Any] = self.family.table.get("pipeline", {})

    def _fields(self, part: str, sizes: Sizes | None, published: bool = False) -> dict[str, Any]:
        """Returns the arguments of a part's class."""
        words = self.omni.published if published else self.omni.tiny_sizes()
        own = self.family.published if published else self.family.tiny_sizes(sizes)
        return dict(self.family.fill("configuration", {**words, **own})[part])

    def _class(self, part: str) -> Any:
        import diffusers
        import transformers

        return getattr(transformers if part.startswith("text") else diffusers, self.family.table["classes"][part])

    def tiny_transformer(self, seed: int = 0, sizes: Sizes | None = None) -> Any:
        """Returns the diffusion transformer, float32."""
        return drawn(self._class("transformer")(**self._fields("transformer", sizes)), seed, "transformer")

    def tiny_vae(self, seed: int = 0, sizes: Sizes | None = None) -> Any:
        """Returns the VAE, float32; its statistics of latents, where it has some, are drawn, too."""
        vae = drawn(self._class("vae")(**self._fields("vae", sizes)), seed, "vae")
        for name, buffer in vae.named_buffers():
            if ".running_" in name:
                buffer.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(seed))
        return vae

    def tiny_text_encoder(self, seed: int = 0, sizes: Sizes | None = None) -> Any:
        """Returns the text encoder, float32."""
        config = self._class("text_config")(**self._fields("text_encoder", sizes))
        return drawn(self._class("text_encoder")(config), seed, "text_encoder")

    def make_scheduler(self, **changes: Any) -> Any:
        """Returns diffusers' scheduler; the `shift` of Z-Image's times is 6, of Turbo's 3."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(**self.family.table["configuration"]["scheduler"] | changes)

    def _texts(self, published: bool) -> dict[str, Any]:
        """Returns the part that reads prompts, by its folder: a tokenizer, or a processor of pictures, too."""
        layout = self.omni.layout(self.omni.published if published else self.omni.tiny_sizes())
        tokenizer = make_tokenizer(layout)
        tokenizer.chat_template += self.family.table.get("template_end", "")
        if self.omni is QWEN2_5_OMNI:
            return {"tokenizer": tokenizer}
        from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

        sizes: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
        levels: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        area = {"shortest_edge": 1024, "longest_edge": 16_777_216}
        processor = Qwen3VLProcessor(
            image_processor=Qwen2VLImageProcessor(size=area, **sizes, **levels),
            tokenizer=tokenizer,
            video_processor=Qwen3VLVideoProcessor(**sizes, **levels),
            chat_template=tokenizer.chat_template,
        )
        return {"processor": processor}

    def pipeline_of(self, transformer: Any, vae: Any, text_encoder: Any = None, **schedule: Any) -> Any:
        """Returns diffusers' pipeline of these parts; without an encoder it encodes no prompt."""
        return self._class("pipeline")(
            scheduler=self.make_scheduler(**schedule),
            vae=vae,
            text_encoder=text_encoder,
            transformer=transformer,
            **self._texts(published=False),
            **self._options,
        )

    def tiny_pipeline(self, seed: int = 0, *, sizes: Sizes | None = None, **schedule: Any) -> Any:
        """Returns diffusers' pipeline of the tiny parts; `schedule` goes to `make_scheduler`."""
        parts = self.tiny_transformer(seed, sizes), self.tiny_vae(seed, sizes), self.tiny_text_encoder(seed, sizes)
        return self.pipeline_of(*parts, **schedule)

    def full_transformer(self) -> Any:
        """Returns the diffusion transformer at its published size, on the device that is set."""
        return self._class("transformer")(**self._fields("transformer", None, published=True))

    def full_vae(self) -> Any:
        """Returns the VAE at its published size, on the device that is set."""
        return self._class("vae")(**self._fields("vae", None, published=True))

    def write_tiny(self, folder: Path, seed: int = 0, *, sizes: Sizes | None = None) -> None:
        """Writes the checkpoint: `model_index.json` and a folder for each part. Raises FolderError."""
        claim_folder(folder, {"kind": f"tiny-{self.name}", "seed": seed})
        self.tiny_pipeline(seed, sizes=sizes).save_pretrained(folder)

    def write_full(self, folder: Path) -> None:
        """Writes the published sizes and no weights; vLLM fills them with `load_format: dummy`, in each stage.

        Raises FolderError if the folder holds other files.
        """
        claim_folder(folder, {"kind": f"full-{self.name}"})
        with torch.device("meta"):
            transformer, vae = self.full_transformer(), self.full_vae()
        transformer.save_config(folder / "transformer")
        vae.save_config(folder / "vae")
        self.make_scheduler().save_config(folder / "scheduler")
        text_config = self._class("text_config")(**self._fields("text_encoder", None, published=True))
        text_config.save_pretrained(folder / "text_encoder")
        for name, part in self._texts(published=True).items():
            part.save_pretrained(folder / name)
        index = {"_class_name": self.family.table["classes"]["pipeline"], **self._options}
        write_json(folder / "model_index.json", index)


Z_IMAGE = PictureFamily("z_image", QWEN2_5_OMNI)
QWEN_IMAGE = PictureFamily("qwen_image", QWEN3_OMNI)
FLUX2_KLEIN = PictureFamily("flux2_klein", QWEN2_5_OMNI)
