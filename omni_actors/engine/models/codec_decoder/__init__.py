"""The decoder of Qwen's 12.5 Hz codec, frame by frame: what Qwen3-Omni's code2wav and Qwen3-TTS's tokenizer share.

A chunk continues the one before it exactly, because every layer keeps the little that it still needs of the past; no
context is computed twice. `decoder.py` has the network; `runner.py` cuts requests into chunks and serves them in
batches.
"""
