"""LoRA adapters of the tiny checkpoint, as PEFT writes them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.reference import Reference

RANK, ALPHA = 8, 16
MODULES = ("self_attn.q_proj", "mlp.down_proj")


def weights(reference: Reference, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each adapted module of the thinker, by its name in transformers' model."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, module in reference.model.thinker.model.named_modules():
        if name.endswith(MODULES):
            outputs, inputs = module.weight.shape
            a = torch.randn(RANK, inputs, generator=random) * 0.1
            made[f"thinker.model.{name}"] = (a, torch.randn(outputs, RANK, generator=random) * 0.1)
    return made


def write_adapter(folder: Path, reference: Reference, seed: int, rank: object = RANK) -> Path:
    """An adapter of random weights."""
    folder.mkdir()
    tensors = {}
    for name, (a, b) in weights(reference, seed).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none", "task_type": "CAUSAL_LM"}
    config["target_modules"] = [name.split(".")[-1] for name in MODULES]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@contextlib.contextmanager
def merged(reference: Reference, seed: int) -> Iterator[None]:
    """transformers' model with an adapter's weights merged into its own."""
    changed = []
    for name, (a, b) in weights(reference, seed).items():
        weight = reference.model.get_submodule(name).weight
        changed.append((weight, weight.detach().clone()))
        weight.data += b @ a * (ALPHA / RANK)
    try:
        yield
    finally:
        for weight, original in changed:
            weight.data.copy_(original)
