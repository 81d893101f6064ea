"""A tokenizer, a server that several tests share, and `penstock serve` on a little model."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from serving_makers import TEMPLATE, make_model, make_tokenizer, running

from makers.models import tiny_model
from makers.processes import child_environment
from penstock.chat import load_template
from penstock.models.exporting import export

SERVE = (
    "import typer; from penstock.use.cli.serve import run; app = typer.Typer(); "
    "app.command()(run); app()"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def server(tokenizer):
    with running(make_model(tokenizer)) as server:
        yield server


@pytest.fixture(scope="session")
def model():
    return tiny_model(270, seed=3, kv_heads=None)


@pytest.fixture(scope="session")
def folder(tmp_path_factory, model, tokenizer):
    folder = tmp_path_factory.mktemp("exported") / "little"
    template, stop = (
        load_template(TEMPLATE, tokenizer=tokenizer),
        tokenizer.special_tokens["<|end|>"],
    )
    export(
        model, folder, tokenizer=tokenizer, template=template, stop_ids=[stop], context_length=128
    )
    return folder


@pytest.fixture
def command(folder, request):
    """`penstock serve`, with more options by `@pytest.mark.parametrize("command", …,
    indirect=True)`.
    """
    words = [
        sys.executable,
        "-c",
        SERVE,
        str(folder),
        "--port",
        "0",
        "--threads",
        "1",
        *getattr(request, "param", ()),
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment()
    ) as process:
        line = process.stdout.readline()
        assert line.startswith("penstock: little at http://127.0.0.1:"), process.stderr.read()
        yield SimpleNamespace(url=line.split()[-1], process=process)
        process.kill()
