"""The class of `ray_platform`, in a module of its own, since vLLM cannot import its own platforms yet when it asks."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuWithRay(CpuPlatform):
    ray_device_key = "GPU"
