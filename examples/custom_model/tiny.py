"""Writes a tiny Llama with random weights and a tokenizer, so that the example needs no download.

PYTHONPATH=examples python -m custom_model.tiny checkpoints/tiny_llama --tokenizer checkpoints/tiny_qwen2_5_omni
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def write(folder: Path, tokenizer_from: Path) -> None:
    """Write a checkpoint of about 1 MB, with the same weights each time."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of size 32, the smallest that the CPU kernels support
        num_key_value_heads=1,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a checkpoint whose tokenizer is used")
    options = parser.parse_args()
    write(options.folder, options.tokenizer)
