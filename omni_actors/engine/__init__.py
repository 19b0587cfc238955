"""The only package that imports vLLM, so a change in a vLLM release is dealt with here and nowhere else.

Importing any part of it first prepares the process for vLLM. Light processes (client, coordinator, launcher) import
nothing from here.
"""

from omni_actors.engine.platform import prepare

prepare()
