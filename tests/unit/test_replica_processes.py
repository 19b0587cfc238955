"""How the processes of stages begin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPOSITORY

LAUNCHER = """
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from omni_actors.launcher.replica_processes import start_light

print("the main module runs", flush=True)
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=os.write, args=(1, b"a child runs\\n")) for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(start_light, processes))
    for process in processes:
        process.join(60)
    print("the main module is", __import__("sys").modules["__main__"].__file__)
"""


def test_processes_of_stages_do_not_run_the_launchers_main_module(tmp_path: Path) -> None:
    """multiprocessing would have them do so, which takes longer than the start of an echo stage."""
    program = tmp_path / "main.py"
    program.write_text(LAUNCHER)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    main, *children, main_again = done.stdout.splitlines()
    assert main == "the main module runs"
    assert children == ["a child runs"] * 3
    assert main_again == f"the main module is {program}"
