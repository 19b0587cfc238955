"""The documentation builds, is complete, and what it shows is read by what would run it."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import Struct

from omni_actors import config, launch
from omni_actors.cli.main import SUBCOMMANDS
from omni_actors.config import CoordinatorConfig, HttpConfig, PipelineConfig
from omni_actors.config.schema import ClusterConfig
from omni_actors.errors import ERROR_CLASSES, ErrorCode
from omni_actors.http_server import bodies, chat, generation, videos
from omni_actors.http_server.store import MAX_FILES, MAX_VIDEOS
from omni_actors.media import decoders
from omni_actors.media.limits import MediaLimits
from omni_actors.protocol.fields import Limits
from omni_actors.stage import attempts
from scripts import reference_docs
from tests.support.paths import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.mark.nightly
def test_the_site_is_built(tmp_path: Path) -> None:
    """A dead link, a page that is in no menu, or an import path that is gone fails the build."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", reference_docs.PARTS)
def test_generated_parts_are_current(name: str) -> None:
    path, text, wanted = reference_docs.current(name)
    assert text == wanted, f"docs/{path.name} is out of date; run python scripts/reference_docs.py"


def test_every_error_code_has_a_cure() -> None:
    text = (DOCS / "troubleshooting.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert list(sections) == [code.value for code in ErrorCode], "one each, in the order of the table"
    assert all(len(cure.split()) >= 10 for cure in sections.values())


def test_the_protocol_says_who_acts_on_an_error_as_its_class_does() -> None:
    section = (DOCS / "protocol.md").read_text().partition("## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \| (yes|no) \|$", section, re.M)
    listed = {code: (fault, retry) for codes, fault, retry in rows for code in re.findall(r"`(\w+)`", codes)}
    assert set(listed) == set(ErrorCode)
    for code, (fault, retry) in listed.items():
        kind = ERROR_CLASSES[ErrorCode(code)]
        assert fault.startswith(kind.fault), code
        assert (retry == "yes") == kind.retryable, code


def test_every_route_and_flag_of_the_server_is_described() -> None:
    from omni_actors.http_server import __main__ as server
    from omni_actors.http_server.app import openapi_document

    text = (DOCS / "http.md").read_text()
    for route in openapi_document()["paths"]:
        name = re.sub(r"\{(\w+)\}", lambda found: "ID" if found[1].endswith("_id") else found[1].upper(), route)
        assert name in text, name
    help_text = server.parser().format_help()
    keys = HttpConfig.__struct_fields__  # configuration.md has each
    flags = set(re.findall(r"--[a-z][a-z-]+", help_text)) - {"--help", "--endpoint"}
    flags -= {f"--http-{key.replace('_', '-')}" for key in keys if key not in ("certificate", "key")}
    assert len(flags) >= 7
    assert not [flag for flag in flags if f"`{flag}" not in text]


def test_every_error_code_of_the_server_is_on_a_page() -> None:
    text = "".join((DOCS / page).read_text() for page in ("http.md", "realtime.md", "troubleshooting.md"))
    sources = (REPOSITORY / "omni_actors" / "http_server").rglob("*.py")
    codes = {code for source in sources for code in re.findall(r'code="(\w+)"', source.read_text())}
    assert len(codes) >= 20
    codes -= {"incomplete_body"}  # of a client that is gone
    assert not [code for code in sorted(codes) if f"`{code}`" not in text]


def test_every_field_of_openai_and_vllm_is_listed_and_known() -> None:
    """A field that is new there shows up here, until it is decided what it means here."""
    from openai.types import completion_create_params as of_completions
    from openai.types.chat import completion_create_params as of_chats

    section = (DOCS / "http.md").read_text().partition("\n## What is supported\n")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section, re.M)
    listed = {name for row in rows for name in re.findall(r"\w+", row)}
    for body, of_openai, of_vllm in (
        (chat.BODY, of_chats.CompletionCreateParamsBase, ("chat_completion", "ChatCompletionRequest")),
        (chat.COMPLETION_BODY, of_completions.CompletionCreateParamsBase, ("completion", "CompletionRequest")),
    ):
        theirs = set(of_openai.__annotations__) | fields_in_vllm(*of_vllm)
        assert len(theirs) > 40
        assert not theirs - set(body.kind.__struct_fields__)
        assert not theirs - listed


def fields_in_vllm(package: str, name: str) -> set[str]:
    """The fields of a request, read from the source: to import it takes seconds."""
    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    tree = ast.parse((folder / "entrypoints" / "openai" / package / "protocol.py").read_text())
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    names = [node.target.id for node in found.body if isinstance(node, ast.AnnAssign)]
    return {name for name in names if not name.startswith("_")}


PAGES = [REPOSITORY / "README.md", REPOSITORY / "launch" / "README.md", *sorted(DOCS.rglob("*.md"))]
PATH = re.compile(r"(?<![\w./:@$-])((?:[\w-]+/)+[\w-]+\.(?:py|sh|sbatch|yaml|service|md|json))(?![\w/])")
FOLDERS = [REPOSITORY, REPOSITORY / "omni_actors", DOCS]  # a path may be relative to any of these
ELSEWHERE = {"deploy/MODEL.yaml", "stage_configs/MODEL.yaml"}  # vllm-omni's, in migrating.md
UNITS = {"s": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MODULE = re.compile(r"python -m ((?:omni_actors|tools|custom_model|custom_diffusion)[\w.]*)")
COMMAND = re.compile(r"(?:^|[`$ ])omni-actors (\w+)", re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_files_and_commands_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    paths = [path for path in PATH.findall(text) if path not in ELSEWHERE]
    missing = [path for path in paths if not any((folder / path).exists() for folder in [*FOLDERS, page.parent])]
    assert not missing
    for name in MODULE.findall(text):
        base = REPOSITORY / "examples" if name.startswith("custom_") else REPOSITORY
        found = base.joinpath(*name.split("."))
        assert found.with_suffix(".py").exists() or (found / "__main__.py").exists(), f"python -m {name}"
    assert set(COMMAND.findall(text)) <= set(SUBCOMMANDS)


def test_the_known_limits_are_those_of_the_code() -> None:
    text = (DOCS / "security.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([\d,]+(?: \w+)?) \|", text, re.M))
    found = {}
    for name, value in rows.items():
        number, _, unit = value.replace(",", "").partition(" ")
        found[name] = int(number) * UNITS.get(unit, 1)
    message, media = Limits(), MediaLimits()
    assert found == {
        "uploaded files, the oldest of which make room": MAX_FILES,
        "videos that were made, likewise": MAX_VIDEOS,
        "jobs of videos under way, per HTTP process": videos.MAX_JOBS,
        "stages of a pipeline": most(PipelineConfig, "stages"),
        "nodes": most(ClusterConfig, "nnodes"),
        "JSON of an HTTP request without its media": bodies.MAX_TEXT_BYTES,
        "members and items in it": bodies.MAX_VALUES,
        "members and items in it, text completions": bodies.MAX_TOKEN_VALUES,
        "lists and objects in it": bodies.MAX_CONTAINERS,
        "messages of a chat": generation.MAX_MESSAGES,
        "parts of a message": generation.MAX_PARTS,
        "requests in flight": most(CoordinatorConfig, "max_in_flight"),
        "requests that wait for a slot": most(CoordinatorConfig, "max_queued"),
        "tensors and media in a message": message.buffers,
        "one tensor or medium of a message": message.buffer_bytes,
        "a message": message.message_bytes,
        "a message without its tensors and media": message.body_bytes,
        "audio of a prompt": media.audio_seconds,
        "frames of a video": media.video_frames,
        "pixels of an image": media.image_pixels,
        "all media of a request, decoded": media.decoded_bytes,
        "time to decode them": decoders.DECODE_SECONDS,
        "memory to decode one of them": decoders.MEMORY_BYTES,
        "pixels of a frame in a video file": media.film_pixels,
        "frames in a video file": media.film_frames,
        "audio channels in a file": media.channels,
        "input that waits for its announcement, per replica": attempts.MAX_EARLY_BYTES,
    }


def most(config: type[Struct], key: str) -> int:
    """The largest value, or the largest length, that a key may have."""
    schema = msgspec.json.schema(config)["$defs"][config.__name__]["properties"][key]
    return int(schema.get("maximum", schema.get("maxItems")))


def test_every_promise_has_a_test_that_every_change_runs() -> None:
    """That the tests which CONTRIBUTING.md names exist, and are not left to the night."""
    section = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("### What keeps each promise\n")[2]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", section)
    assert len(named) >= 50
    for path, name in named:
        marks = promised_by(path).get(name)
        assert marks is not None, f"{path}::{name}"
        assert "pytest.mark.nightly" not in marks, f"{path}::{name}"


def test_everything_that_may_die_has_a_test() -> None:
    rows = re.findall(r"^\| (?!what |--)(.*) \|$", (DOCS / "failures.md").read_text(), re.M)
    assert len(rows) >= 20
    for row in rows:
        what, *_, test = row.split(" | ")
        named = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`|the same test", test)
        assert named is not None, what
        assert not named[1] or named[2] in promised_by(named[1]), what


def promised_by(path: str) -> dict[str, list[str]]:
    """The tests of a file and their marks, state machines of hypothesis among them."""
    found = {}
    marks: list[str] = []
    for node in ast.parse((REPOSITORY / path).read_text()).body:
        if isinstance(node, ast.Assign):  # a state machine of hypothesis, or the marks of the whole file
            (target,) = map(ast.unparse, node.targets)
            if target == "pytestmark":
                marks = re.findall(r"pytest\.mark\.\w+", ast.unparse(node.value))
            found[target] = marks
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = [*marks, *map(ast.unparse, node.decorator_list)]
    return found


PAGE = (REPOSITORY / "docs" / "deploying.md").read_text()
SECTIONS = dict(re.findall(r"^##+ (.*?)\n(.*?)(?=^##+ |\Z)", PAGE, re.M | re.S))
GPUS = {  # by section
    "One GPU of 80 GB": 1,
    "One GPU of 48 GB": 1,
    "MiniCPM-o on one GPU of 48 GB": 1,
    "One GPU of 24 GB": 1,
    "Two GPUs of 24 GB": 2,
    "Two GPUs of 80 GB": 2,
}


def commands(section: str) -> list[list[str]]:
    """The commands of a section's shell blocks, in words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", SECTIONS[section], re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize(("section", "gpus"), GPUS.items())
def test_a_recipe_is_a_pipeline_for_its_gpus(section: str, gpus: int) -> None:
    """Loading adds up the shares of each GPU's memory."""
    (words,) = commands(section)
    assert words[:2] == ["omni-actors", "launch"]
    options = launch.parser().parse_args(words[2:])
    pipeline = config.load(options.config, launch.overrides(options), devices=gpus).pipeline
    used = {device for stage in pipeline.stages for device in config.replica_devices(stage, stage.processes - 1, gpus)}
    assert used == set(range(gpus))


@pytest.mark.parametrize(
    "section",
    [
        *("Slurm", "Kubernetes", "Open WebUI", "Many prompts from a file"),
        "CosyVoice 2 in the voice of a recording",
        "A chat model that is spoken while it writes",
        "A cascade: a chat model that is spoken to, and spoken",
    ],
)
def test_the_commands_of_a_recipe_parse_and_name_what_is_there(section: str) -> None:
    for words in commands(section):
        for word in words:
            if word.startswith(("launch/", "deploy/", "examples/")):
                assert (REPOSITORY / word).exists(), word
        if words[:2] == ["omni-actors", "launch"]:
            launch.parser().parse_args([word for word in words[2:] if word != "&"])
    blocks = re.findall(r"^```bash\n(.*?)^```", SECTIONS[section], re.M | re.S)
    for block in blocks:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True, timeout=20)


def test_a_proxy_neither_buffers_nor_cuts_off_what_the_server_allows() -> None:
    (server,) = re.findall(r"^```nginx\n(.*?)^```", SECTIONS["Behind nginx"], re.M | re.S)
    assert server.count("{") == server.count("}") == 2
    directives = dict(re.findall(r"^ +(\w+) (.*);$", server, re.M))
    assert directives["proxy_buffering"] == "off"
    assert directives["client_max_body_size"] == "64m", "http.body_bytes"
    assert config.HttpConfig().body_bytes == 64 << 20
    assert int(directives["proxy_read_timeout"].removesuffix("s")) >= config.HttpConfig().request_timeout


MIGRATING = (REPOSITORY / "docs" / "migrating.md").read_text()


def test_the_yaml_after_the_move_is_valid_and_keeps_the_values(tmp_path: Path) -> None:
    before, after = re.findall(r"```yaml\n(.*?)```", MIGRATING, re.S)
    file = tmp_path / "pipeline.yaml"
    file.write_text(after)
    pipeline = config.load(file, devices=1).pipeline
    assert [stage.name for stage in pipeline.stages] == ["prompt", "thinker", "talker", "code2wav"]
    assert set(pipeline.modalities) == {"text", "audio"}
    for name, value in re.findall(r"(gpu_memory_utilization|temperature|top_k|top_p): ([\d.]+)", before):
        if value != "0.15":  # the vocoder's share, which has no counterpart
            assert f"{name}: {value}" in after
