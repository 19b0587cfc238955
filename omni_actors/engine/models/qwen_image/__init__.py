"""Qwen-Image-2.1: pictures from text, and from up to ten pictures (its weights must not be used commercially)."""
