"""The OpenAI-compatible HTTP server: a separate process that reaches the pipeline through the client library only.

`python -m omni_actors.launch CONFIG --http HOST:PORT` starts it with a pipeline, `python -m omni_actors.http_server`
alone, next to a running one. It imports neither torch nor vLLM. `docs/http.md` is the reference.

The path of a request: `connections.py` (bounds before anything is parsed), `middleware.py` (host, origin, key),
`app.py` (the table of all routes), `bodies.py` and `decoding.py` (the body as a struct of `fields.py` and
`generation.py`), the route's module such as `chat.py`, `answer.py` (the pipeline's answer and its end). What routes
share is in `state.py`, what requests share in `shares.py`.
"""
