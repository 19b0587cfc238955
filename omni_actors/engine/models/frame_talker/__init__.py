"""What the talkers of Qwen3-Omni and Qwen3-TTS have in common: they decode frames of codes, one step a frame.

`model.py` is the model, but for its layers, `state.py` what happens around a step, `outputs.py` how frames leave. A
family adds what its prompt is made of.
"""
