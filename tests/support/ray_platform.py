"""A platform for vLLM: its CPU as it is, on which Ray counts devices.

vLLM's Ray executor places a worker on a device that Ray counts, and its CPU platform has none. A platform of one's own
is vLLM's way to add what it does not know (the entry points `vllm.platform_plugins`); executor, workers and runners are
vLLM's and ours, unchanged.
"""

from __future__ import annotations

from pathlib import Path

NAME = "cpu_with_ray"


def install(folder: Path) -> None:
    """Make the platform known to processes that have `folder` in their import path and NAME in VLLM_PLUGINS."""
    info = folder / f"{NAME}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{NAME} = {__name__}:platform\n")


def platform() -> str:
    """The dotted path of the class, which vLLM imports later."""
    return "tests.support.ray_platform_class.CpuWithRay"
