"""Fixtures that every room's tests share."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from makers.browser import Browser, find_browser

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.environ.get("CI"):
    # A busy machine draws slowly; Hypothesis' own profile for CI says the same.
    settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so; the processes that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="also run the tests that are marked slow, as CI does"
    )
    parser.addoption(
        "--real", action="store_true", help="run the tests of real models: make test-real"
    )
    parser.addoption(
        "--write",
        action="store_true",
        help="with --real: write what they measure into the documentation",
    )


def pytest_sessionstart() -> None:
    """Collecting tests imports everything and leaves no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--real"):
        real = [item for item in items if item.get_closest_marker("real")]
        items[:] = [item for item in items if not item.get_closest_marker("real")]
        config.hook.pytest_deselected(items=real)
    if config.getoption("--slow") or os.environ.get("CI"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow: CI runs it, and --slow"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The shared folder of real tokenizers, chats and texts; the test is skipped where it is
    absent.
    """
    folder = Path(
        os.environ.get("PENSTOCK_REAL_DATA", Path(__file__).parents[2] / "shared" / "data")
    )
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set PENSTOCK_REAL_DATA")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; the test is skipped where there is none."""
    binary = find_browser()
    if binary is None:
        pytest.skip("no Chromium on the path; install one or name it in PENSTOCK_BROWSER")
    found = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `penstock` with the given words in this process: exit code, standard output and standard
    error.

    Without the line that kernels are compiled, which depends on what ran before.
    """
    from penstock.core import kernel_cache
    from penstock.use.cli import main

    monkeypatch.setattr(kernel_cache._Compiling, "_say", lambda self: None)

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["penstock", *map(str, words)])
        with pytest.raises(SystemExit, match=r"^\d$") as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def plain_torch() -> Iterator[None]:
    """The trainer sets threads and determinism for the whole process; this sets them back."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
