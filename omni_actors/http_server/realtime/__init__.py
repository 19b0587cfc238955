"""The route /v1/realtime: a spoken conversation over a WebSocket, with OpenAI's events.

`session.py` decides and does no I/O: an event of the client or a piece of an answer goes in, instructions come out. It
is made of `conversation.py` (items), `response.py` (a running answer), `turns.py` (the user's sound), `formats.py`
(sound on the wire) and `config.py`. `connection.py` carries the instructions out: it owns the WebSocket and the clocks,
`requests.py` the requests to the pipeline. `docs/realtime.md` is the reference. `live.py` has the same sessions
talk OpenAI's Live API, with the events of `live_events.py` (`docs/realtime.md`).
"""
