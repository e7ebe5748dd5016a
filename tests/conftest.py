"""Fixtures that every suite may use. Tests use no network, and CI skips no test."""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from shards import IS_FULL

if TYPE_CHECKING:
    from sightline.inference.server_spec import ServerSpec
    from sightline.media import MediaStore

ROOT = Path(__file__).resolve().parents[1]

# Before torch or a tokenizer is imported, and inherited by the processes that tests start: two
# cores are shared by all tests, and nothing may use the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Imported modules stay, so the garbage collector does not need to scan them.
gc.disable()

# A busy machine must not fail a test, and CI always tries the same examples.
hypothesis_settings.register_profile(
    "sightline",
    deadline=None,
    derandomize=not IS_FULL,
    suppress_health_check=[HealthCheck.too_slow],
)
hypothesis_settings.load_profile("sightline")


@pytest.fixture(scope="session")
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny checkpoint, Qwen-VL's unless `--family` says otherwise. Do not change it."""
    from sightline.families.registry import write_tiny

    path = tmp_path_factory.mktemp("models") / "tiny"
    family, _, kind = str(request.config.getoption("--family")).partition(":")
    if kind:
        from tests.contract.cases.anyvlm import write_kind

        write_kind(kind, path)
    else:
        write_tiny(family, path, seed=0)
    return path


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> MediaStore:
    """The store of the servers under test."""
    from sightline.media import MediaStore

    return MediaStore(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="session")
def settings(tiny_model: Path, media: MediaStore) -> ServerSpec:
    """Return the settings of the server that most tests use."""
    from sightline.inference.server_spec import ServerSpec

    return ServerSpec.of(
        path=tiny_model,
        media_roots=(media.root,),
        device="cpu",
        max_num_seqs=64,
        max_model_len=4096,
        weights_root="/",
    )


@pytest.fixture(scope="session")
def odd_settings(settings: ServerSpec) -> ServerSpec:
    """Return settings with everything disabled, small or unusual, because some servers start
    slowly.
    """
    return settings.replace(
        pixel_cache_mb=0,
        feature_cache_mb=0,
        enable_prefix_caching=False,
        prefill_chunk_tokens=5,
        max_num_seqs=2,
        max_waiting=30,
        keep_kv_over_updates=True,
    )


@pytest.fixture(scope="session", autouse=True)
def early_start(request: pytest.FixtureRequest) -> None:
    """Start the vLLM servers that the tests need with the first test, in parallel."""
    if request.config.getoption("--vllm"):
        import vllm_servers

        names = {name for item in request.session.items for name in item.fixturenames}
        for name in sorted({"settings", "odd_settings"} & names, reverse=True):
            vllm_servers.start(request.getfixturevalue(name))


@pytest.fixture
def store(tmp_path: Path) -> MediaStore:
    """An empty store."""
    from sightline.media import MediaStore

    return MediaStore(tmp_path / "media")


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the folder of reference material next to the checkout."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("there is no folder `shared` beside the checkout")
    return path


# A test that connects to another machine fails, however the code handles the refusal. Code that
# connects without Python's sockets, and other processes, are not detected here.


class Fence:
    """Refuse connections to other machines and lookups of other names, and record the attempts."""

    def __init__(self) -> None:
        self.tried: list[str] = []
        self._names = {"", "localhost", socket.gethostname()}

    def check(self, host: Any, what: str) -> None:
        host = host.decode() if isinstance(host, bytes) else host
        if host is None or host in self._names:
            return
        try:
            address = ipaddress.ip_address(str(host).partition("%")[0])
            is_here = what == "look up" or address.is_loopback or address.is_unspecified
        except ValueError:
            is_here = False
        if not is_here:
            self.tried.append(f"{what} {host}")
            raise ConnectionRefusedError(f"a test may not {what} {host}: it stays on this machine")

    def stand(self, patch: pytest.MonkeyPatch) -> None:
        connect, connect_ex = socket.socket.connect, socket.socket.connect_ex
        getaddrinfo = socket.getaddrinfo

        def to(sock: socket.socket, address: Any) -> None:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                self.check(address[0], "connect to")

        def guarded(sock: socket.socket, address: Any) -> None:
            to(sock, address)
            connect(sock, address)

        def guarded_ex(sock: socket.socket, address: Any) -> int:
            to(sock, address)
            return connect_ex(sock, address)

        def looked_up(host: Any, *args: Any, **named: Any) -> Any:
            self.check(host, "look up")
            return getaddrinfo(host, *args, **named)

        patch.setattr(socket.socket, "connect", guarded)
        patch.setattr(socket.socket, "connect_ex", guarded_ex)
        patch.setattr(socket, "getaddrinfo", looked_up)


@pytest.fixture(scope="session")
def fence() -> Iterator[Fence]:
    with pytest.MonkeyPatch.context() as patch:
        fence = Fence()
        fence.stand(patch)
        yield fence


@pytest.fixture(autouse=True)
def only_here(fence: Fence) -> Iterator[list[str]]:
    """Yield the outside addresses that a test tried, and fail unless the test clears the list.

    The tests of the fence itself do clear it.
    """
    fence.tried.clear()
    yield fence.tried
    if fence.tried:
        pytest.fail(f"the test left this machine: {', '.join(fence.tried)}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


# In CI a skipped test fails, unless its reason names a resource that CI lacks.

EXCUSES = ("gpu", "shared", "make full", "right to mount")


class SkipJudge:
    """Collect skips without an allowed reason and fail the session."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def saw(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(excuse in reason.lower() for excuse in EXCUSES):
            self.found.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.saw(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.saw(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        if self.found and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section("skipped in CI without an excuse", red=True)
            for line in self.found:
                terminalreporter.write_line(line)


# `--vllm PATH` runs the suites of the generate protocol on vLLM.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm",
        metavar="PATH",
        default="",
        help="serve with the vLLM of this interpreter, in place of the embedded engine",
    )
    parser.addoption(
        "--family",
        metavar="NAME",
        default="qwen_vl",
        help="the family of the tiny checkpoint that the suites of the generate protocol serve; a "
        "kind of the generic one as anyvlm:llava",
    )
    parser.addoption(
        "--shards",
        choices=["", "tensor", "data"],
        default="",
        help="vLLM in two shards: of every matrix, or of the requests",
    )
    parser.addoption(
        "--patience",
        type=float,
        default=1.0,
        help="scales every time limit of the tests and of the start of a vLLM server",
    )
    parser.addoption(
        "--shapes",
        metavar="MODULE,...",
        default="",
        help="check the annotated shapes of these modules' arrays at every call",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    if "vllm_servers" in sys.modules:
        plugins = session.config.pluginmanager

        def report(text: str) -> None:
            with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
                plugins.get_plugin("terminalreporter").write_line(text)

        sys.modules["vllm_servers"].report = report


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "odd_settings" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.second_server)
    if config.getoption("--vllm"):
        gone = [item for item in items if item.get_closest_marker("torch_only")]
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)
    if (patience := config.getoption("--patience")) != 1.0:
        default = config.getoption("--timeout") or float(config.getini("timeout"))
        for item in items:
            mark = item.get_closest_marker("timeout")
            limit_s = mark.args[0] if mark is not None else default
            item.add_marker(pytest.mark.timeout(limit_s * patience), append=False)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    if "vllm_servers" in sys.modules:
        sys.modules["vllm_servers"].end_all()


def pytest_configure(config: pytest.Config) -> None:
    if python := config.getoption("--vllm"):
        import vllm_servers

        vllm_servers.python = python
        vllm_servers.patience = config.getoption("--patience")
        if kind := config.getoption("--shards"):
            vllm_servers.shards = {f"{kind}_parallel_size": 2}
    if modules := config.getoption("--shapes"):
        import shape_checks

        shape_checks.install(modules.split(","))
    if os.environ.get("CI"):
        config.pluginmanager.register(SkipJudge(), "skip-judge")
