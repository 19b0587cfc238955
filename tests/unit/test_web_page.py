"""The files of the web page: what is served, and what of it comes from others."""

from __future__ import annotations

import hashlib
import re

from omni_actors.http_server.app import PAGE_FILES
from tests.support.paths import REPOSITORY

PAGE = REPOSITORY / "omni_actors" / "http_server" / "page"
VENDORED = re.findall(r"^\| `(\S+)` \|.*\(`(\S+)`\) \| `(\w+)` \|$", (PAGE / "vendor" / "README.md").read_text(), re.M)
IMPORT = re.compile(r"""^import .*?["'](.+?)["'];$""", re.M)


def test_every_vendored_file_is_listed_is_as_published_and_has_its_licence() -> None:
    assert sorted(name for name, _, _ in VENDORED) == sorted(path.name for path in PAGE.glob("vendor/*.js"))
    for name, licence, digest in VENDORED:
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == digest, name
        assert len((PAGE / "vendor" / licence).read_text()) > 1000


def test_scripts_import_only_what_is_served() -> None:
    for path in PAGE.glob("*.js"):
        for name in IMPORT.findall(path.read_text()):
            assert f"/{name.removeprefix('./')}" in PAGE_FILES, f"{path.name} imports {name}"


def test_only_files_of_the_page_are_served() -> None:
    assert {name.rpartition(".")[2] for name in PAGE_FILES if name != "/"} == {"js", "css"}
    assert PAGE_FILES["/"].name == "index.html"
