"""Records what the engine package relies on in a release of vLLM, for tests/unit/test_vllm_contract.py.

    python scripts/vllm_signatures.py WHEEL     a wheel, or a folder with the package; needs no GPU and installs nothing

Writes names and parameters to tests/unit/vllm_releases/VERSION.json and prints what the engine would miss; the exit
code is then 1. CONTRIBUTING.md says when to run it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.vllm_contract import problems
from tests.support.vllm_release import RECORDED, describe, describe_imported


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    release, own = describe(parser.parse_args().wheel)
    path = RECORDED / f"{release.version}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(release, order="deterministic"), indent=1) + b"\n")
    installed, _ = describe_imported()
    missing = problems(release, own, installed)
    print(f"wrote {path}; " + ("\n".join(["the engine misses:", *missing]) if missing else "the engine misses nothing"))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
