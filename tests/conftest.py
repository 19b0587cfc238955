"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import runpy
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from omni_actors.engine.platform import prepare
from omni_actors.transport.sockets import Sockets
from tests.support import guard, sharing, trust
from tests.support.launcher import EchoLauncher
from tests.support.paths import REPOSITORY
from tests.support.pipelines import RunningPipeline, remove_run_directories
from tests.support.processes import assert_nothing_left, end_all, processes_of, shared_memory_of

if TYPE_CHECKING:
    from tests.support.servers import HttpPipeline

gc.disable()  # until all tests are read: looking through what they import takes a third of that time
prepare()  # before any file of tests imports vLLM, in whatever order they are read
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models are tiny and the processes many: threads of one model that wait for each other cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How many examples hypothesis tries, for all tests: few and always the same, or many (scripts/nightly.sh).
settings.register_profile("default", max_examples=30, derandomize=True, database=None, deadline=None)
settings.register_profile("nightly", max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")
ECHO_STAGES = {"process", "chaos", "http", "nodes"}  # folders whose tests start no models, unless marked e2e


def pytest_configure() -> None:
    """Starts the guard: nothing that tests start outlives them, however they end. Makes clients cheap."""
    guard.begin()
    trust.share()


def pytest_sessionfinish(exitstatus: int) -> None:
    """Removes the logs of pipelines if all tests have passed."""
    if exitstatus == 0:
        remove_run_directories()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder with a path that is short enough for sockets; removed at the end, whatever is in it."""
    with tempfile.TemporaryDirectory(prefix="ot-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Sockets without keys; all are closed at the end."""
    made = Sockets()
    yield made
    made.context.destroy(linger=0)


@pytest.fixture
def launch(short_path: Path) -> Iterator[Callable[..., EchoLauncher]]:
    """Starts launchers for one test; at the end nothing of them may be left."""
    launchers: list[EchoLauncher] = []
    shared: set[str] = set()

    def start(data: Any, *arguments: str, **options: Any) -> EchoLauncher:
        launchers.append(EchoLauncher(options.pop("folder", short_path), data, *arguments, **options))
        return launchers[-1]

    try:
        yield start
        shared |= shared_memory_of(processes_of(short_path))
        for launcher in launchers:
            if launcher.process.poll() is None:
                launcher.end()
        assert_nothing_left(short_path, 6.0, shared)
    finally:
        end_all(short_path)
        for launcher in launchers:
            launcher.process.wait()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen2.5-Omni checkpoint (seed 0): the folder in OMNI_TEST_CHECKPOINT, else built for this run."""
    given = os.environ.get("OMNI_TEST_CHECKPOINT")
    if given:
        folder = Path(given)
        if not (folder / "model.safetensors").exists():
            pytest.fail(f"OMNI_TEST_CHECKPOINT={given} holds no checkpoint")
        return folder
    from tools.checkpoints.omni import write_tiny
    from tools.checkpoints.reference import quiet_transformers

    quiet_transformers()
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_qwen2_5_omni"
    write_tiny(folder)  # tests/e2e compares what it answers
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-Omni checkpoint (seed 0), built for this run."""
    from tools.checkpoints.omni import QWEN3_OMNI, write_tiny
    from tools.checkpoints.reference import quiet_transformers

    quiet_transformers()
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_qwen3_omni"
    write_tiny(folder, family=QWEN3_OMNI)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_tts_kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny Qwen3-TTS checkpoints by kind, built for this run."""
    from tools.checkpoints.tts import KINDS, write_tiny

    folders = {kind: tmp_path_factory.mktemp("checkpoint") / f"tiny_qwen3_tts_{kind}" for kind in KINDS}
    for kind, folder in folders.items():
        write_tiny(folder, kind)
    return folders


@pytest.fixture(scope="session")
def tiny_qwen3_tts(tiny_qwen3_tts_kinds: dict[str, Path]) -> Path:
    """The one with voices of its own."""
    return tiny_qwen3_tts_kinds["custom_voice"]


@pytest.fixture(scope="session")
def tiny_qwen3_asr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-ASR checkpoint, built for this run."""
    from tools.checkpoints.asr import write_tiny

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_qwen3_asr"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3_aligner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint of Qwen3-ASR's forced aligner, built for this run."""
    from tools.checkpoints.asr import write_tiny

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_qwen3_aligner"
    write_tiny(folder, aligner=True)
    return folder


@pytest.fixture(scope="session")
def tiny_minicpm_o(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint of MiniCPM-o 4.5, built for this run."""
    from tools.checkpoints.minicpm import write_tiny

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_minicpm_o"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_cosyvoice2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint of CosyVoice 2, built for this run."""
    from tools.checkpoints.cosyvoice import write_tiny

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_cosyvoice2"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_z_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Z-Image checkpoint, built for this run."""
    from tools.checkpoints.pictures import Z_IMAGE

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_z_image"
    Z_IMAGE.write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen-Image checkpoint, built for this run."""
    from tools.checkpoints.pictures import QWEN_IMAGE

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_qwen_image"
    QWEN_IMAGE.write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_flux2_klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny FLUX.2 klein checkpoint, built for this run."""
    from tools.checkpoints.pictures import FLUX2_KLEIN

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny_flux2_klein"
    FLUX2_KLEIN.write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with the tokenizer of the tiny Qwen2.5-Omni checkpoint, built for this run."""
    checkpoint = tmp_path_factory.mktemp("llama") / "tiny_llama"
    runpy.run_path(str(REPOSITORY / "examples" / "custom_model" / "tiny.py"))["write"](checkpoint, tiny_checkpoint)
    return checkpoint


@pytest.fixture(scope="session")
def tiny_http(tiny_checkpoint: Path) -> Iterator[HttpPipeline]:
    """The tiny Qwen2.5-Omni pipeline with all its processes and an HTTP server, started once per session of tests."""
    from tests.support.servers import HttpPipeline  # slow to import; unit tests do without

    tools = {"tool_call_parser": "hermes", "tool_chat_template": "stage_configs/qwen2_5_omni_tools.jinja"}
    with HttpPipeline("stage_configs/tiny_qwen2_5_omni.yaml", {"model": tiny_checkpoint, **tools}) as pipeline:
        yield pipeline


@pytest.fixture(scope="session")
def tiny_pipeline(tiny_http: HttpPipeline) -> RunningPipeline:
    """The same one, for tests to which its HTTP server does not matter."""
    return tiny_http


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Ends pipelines when the worker's tests need them no more, and lets the last engines end fast."""
    if nextitem is None:
        gc.collect = lambda *_: 0  # vLLM searches all objects for garbage twice for each engine that ends
    yield
    sharing.end_unused(item, nextitem)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Lets tests that share a pipeline run in one worker, where files are given to workers (--dist=loadfile)."""
    return sharing.ByPipeline(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_unconfigure() -> None:
    """Lets the interpreter free what was frozen: bindings complain of what is left at the end."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of real processes without models, by their folder, and has the longest begin first.

    All that is imported by now is no garbage. vLLM looks for some eight times while an engine starts: 0.2 s each.
    """
    gc.freeze()
    gc.enable()
    sharing.sharing_first(items)
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in ECHO_STAGES and item.get_closest_marker("e2e") is None:
            item.add_marker(pytest.mark.process)
