"""The two real models as folders of transformers, and the report of what is measured with them:
`make test-real`.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_report import Report

ROOT = Path(__file__).parents[2]
MODELS = Path(os.environ.get("PENSTOCK_REAL_MODELS", ROOT / "build" / "real" / "models"))
REPORT = pytest.StashKey[Report]()


def _model(name: str) -> Path:
    if not (MODELS / name / "config.json").is_file():
        pytest.fail(f"no model in {MODELS / name}; `make test-real` makes it")
    return MODELS / name


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: a chat model that our transformer computes."""
    return _model("smollm2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M: a base model with another tokenizer, computed by transformers with our
    attention.
    """
    return _model("gemma3")


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mmlu` and `gsm8k` in their official formats: the real ones if they are there,
    else our own few.
    """
    from real_texts import write_questions

    shared = Path(os.environ.get("PENSTOCK_REAL_DATA", ROOT.parent / "shared" / "data")) / "eval"
    if (shared / "mmlu").is_dir() and (shared / "gsm8k").is_dir():
        return shared
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    """What tests add their figures to; saved, and written into the page with `--write`."""
    found = request.config.stash.setdefault(REPORT, Report())
    begin = time.monotonic()
    yield found
    found.seconds = time.monotonic() - begin
    found.save(ROOT / "build" / "real" / "report.json")
    if request.config.getoption("--write") and request.session.testsfailed == 0:
        found.write_section(ROOT / "docs" / "benchmarks.md")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the table, as the page has it."""
    found = config.stash.get(REPORT, None)
    if found is not None and found.figures:
        terminalreporter.write_sep("=", "figures")
        terminalreporter.write_line(f"{found.conditions}\n\n{found.table}")
