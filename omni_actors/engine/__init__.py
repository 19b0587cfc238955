"""The only package that imports vLLM. A vLLM release that moves something is answered here and nowhere else.

Importing any of it prepares the process for vLLM first, so that nobody can forget to. Light processes (client,
coordinator, launcher) import nothing from here.
"""

from omni_actors.engine.platform import prepare

prepare()
