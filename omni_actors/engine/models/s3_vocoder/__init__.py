"""The vocoder of S3 tokens, 25 a second: flow matching makes mel frames of them, HiFT makes sound of these.

MiniCPM-o 4.5 and Step-Audio 2 have it. It speaks with the voice of a recording (`voices.py`). `flow.py` and `hift.py`
have the networks, `runner.py` continues utterances in batches, and `codec_decoder/` cuts them into chunks and serves
them.
"""
