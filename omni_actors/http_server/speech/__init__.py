"""Texts that become sound: /v1/audio/speech, texts that are still being written, and voices of recordings."""
