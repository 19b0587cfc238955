"""The route /v1/realtime: a spoken conversation over a WebSocket, with OpenAI's events.

`session.py` decides and does no I/O: an event of the client or a piece of an answer goes in, instructions come out.
`connection.py` carries them out: it owns the WebSocket, the requests to the pipeline and the clocks. `docs/realtime.md`
is the reference.
"""
