"""The only package that imports vLLM. A vLLM release that moves something is answered here and nowhere else."""
