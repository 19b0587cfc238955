"""The OpenAI-compatible HTTP server: a separate process that reaches the pipeline through the client library only.

`python -m omni_actors.launch CONFIG --http HOST:PORT` starts it with a pipeline, `python -m omni_actors.http_server`
alone, next to a running one. It imports neither torch nor vLLM. `docs/http.md` and `docs/http/` are the reference.
"""
