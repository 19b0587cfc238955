"""Qwen3-ASR: a recording becomes the text of what is said in it."""
