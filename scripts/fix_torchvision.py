#!/usr/bin/env python3
"""Makes torchvision usable next to a CPU-only PyTorch; run it with the environment's own Python.

The package registry's torchvision, torchaudio and torchcodec are CUDA builds. Next to a CPU-only torch their compiled
libraries do not load, and then torchvision cannot even be imported: two of its modules register derivatives and
shapes for operators that do not exist. The Qwen-Omni processors only need torchvision's Python part (resize,
normalise), so this script removes the compiled libraries and empties those two modules. The C++
operators are lost (nms, roi_align, JPEG and PNG decoding); the processors do not use them.

torchaudio and torchcodec have no useful Python part; they are uninstalled if they cannot be imported.

A healthy installation is left alone: the script says so and exits with 0. Exit code 1: the environment is still broken.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

PYTHON_ONLY_MARK = "# Emptied by fix_torchvision.py: the compiled operators this module describes are not installed.\n"
EMPTIED_MODULES = ("_meta_registrations.py", "_autograd_registrations.py")
COMPILED_LIBRARIES = ("_C*.so", "image*.so")
OPTIONAL_PACKAGES = ("torchaudio", "torchcodec")

CHECK_TORCHVISION = """
import torchvision
import transformers
from transformers import Qwen2VLVideoProcessor
Qwen2VLVideoProcessor()
"""


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter; returns "" on success, else the last line of what it printed."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return ""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {result.returncode}"


def package_folder(name: str) -> Path | None:
    """Returns the folder of an installed package without importing it, None when it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def strip_torchvision(folder: Path) -> None:
    """Removes the compiled libraries from a torchvision folder and empties the modules that describe them."""
    for pattern in COMPILED_LIBRARIES:
        for library in folder.glob(pattern):
            library.unlink()
            print(f"fix_torchvision: removed {library.name}")
    for name in EMPTIED_MODULES:
        module = folder / name
        if module.exists():
            module.write_text(PYTHON_ONLY_MARK, encoding="utf-8")
            print(f"fix_torchvision: emptied {name}")


def uninstall_if_broken(name: str) -> None:
    """Uninstalls a package that is installed but cannot be imported."""
    if package_folder(name) is None:
        return
    error = run_python(f"import {name}")
    if not error:
        return
    print(f"fix_torchvision: uninstalling {name}, which cannot be imported ({error})")
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", name], check=True)


def main() -> int:
    """Repairs the environment of the running interpreter; returns the exit code."""
    for name in OPTIONAL_PACKAGES:
        uninstall_if_broken(name)
    error = run_python(CHECK_TORCHVISION)
    if not error:
        print("fix_torchvision: torchvision is healthy, nothing to do")
        return 0
    folder = package_folder("torchvision")
    if folder is None:
        print("fix_torchvision: torchvision is not installed", file=sys.stderr)
        return 1
    print(f"fix_torchvision: torchvision does not work next to this torch ({error})")
    strip_torchvision(folder)
    error = run_python(CHECK_TORCHVISION)
    if error:
        print(f"fix_torchvision: still broken: {error}", file=sys.stderr)
        return 1
    print("fix_torchvision: torchvision now works in pure Python")
    return 0


if __name__ == "__main__":
    sys.exit(main())
