"""Audio, images and video: what a request may bring, and how files are decoded, in processes of their own.

Imports neither torch nor vLLM. The prompt stage and the HTTP server use it; the decoders themselves (libsndfile,
Pillow, FFmpeg) are loaded only in the worker processes that `decoders.py` starts.
"""
