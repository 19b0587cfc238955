"""CosyVoice 2: speaks a text in the voice of a recording."""
