"""Bytecode is kept for packages whose installation has none, and nothing changes for others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from omni_actors.engine.platform import keep_bytecode
print(keep_bytecode(["plain_package"]), sys.pycache_prefix)
import plain_package
print(plain_package.__cached__)
"""


def import_it(tmp_path: Path, *flags: str) -> list[str]:
    (package := tmp_path / "site" / "plain_package").mkdir(parents=True, exist_ok=True)
    if not (module := package / "__init__.py").exists():  # a new date would be another version
        module.write_text("VALUE = 1\n")
    environment = {"PYTHONPATH": f"{tmp_path / 'site'}:{Path.cwd()}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, *flags, "-c", SCRIPT]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()


def test_a_package_without_bytecode_gets_it_in_the_users_cache(tmp_path: Path):
    kept, prefix, cached = import_it(tmp_path, "-B")
    assert (kept, prefix) == ("True", str(tmp_path / "cache" / "omni_actors" / "bytecode"))
    assert cached.startswith(prefix)
    first = Path(cached).stat().st_mtime_ns
    assert import_it(tmp_path, "-B") == [kept, prefix, cached]
    assert Path(cached).stat().st_mtime_ns == first, "compiled again"


def test_a_package_with_bytecode_is_read_where_it_is(tmp_path: Path):
    package = tmp_path / "site" / "plain_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 1\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package)], check=True, timeout=60)
    assert import_it(tmp_path)[:2] == ["False", "None"]
    assert not (tmp_path / "cache").exists()
