"""Qwen2.5-Omni: thinker, talker, and the vocoder (`code2wav` and the modules that it is made of)."""
