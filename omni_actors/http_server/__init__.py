"""The OpenAI-compatible HTTP server: a separate process that reaches the pipeline through the client library only.

`python -m omni_actors.launch CONFIG --http HOST:PORT` starts it with a pipeline, `python -m omni_actors.http_server`
alone, next to a running one. It imports neither torch nor vLLM. `docs/http.md` is the reference.

The path of a request: `connections.py` (bounds before anything is parsed), `app.py` (host, origin, key, the table of
all routes), `bodies.py` (the body as a struct, of types that `generation.py` has for all texts), the route's module
such as `chat.py`, `answer.py` (the pipeline's answer and its end). What routes share is in `state.py`.
"""
