"""A run on data behind a password keeps it out of its folder, its output, and what other tools get
of the run file.
"""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from training_makers import make

import penstock as ps
from makers.secret_server import found_secrets, leaks, printed, secret_server
from penstock.core.errors import PenstockError
from penstock.learn.training.distributed import Ranks
from penstock.use.runs.starting import train_to_end

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture
def server(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    shutil.copytree(data / "data" / "train", tmp_path / "served" / "train")
    with secret_server(tmp_path / "served", monkeypatch) as running:
        yield running


def write_run(folder: Path, url: str, **training) -> Path:
    folder.mkdir()
    run = {
        "data": {
            "sources": [{"path": url}],
            "loader": {"sequence_length": 64, "rows_per_step": 4, "seed": 1},
        },
        "model": {"layers": 1, "width": 16, "heads": 2},
        "training": {"steps": 2, "threads": 1, **training},
    }
    (folder / "run.yaml").write_text(f"# {url}\n{yaml.safe_dump(run)}")
    return folder


@pytest.mark.parametrize("kind", ["private", "signed"])
def test_a_run_from_a_run_file(server, tmp_path, capsys, kind):
    url = getattr(server, kind)("train")
    given, said = write_run(tmp_path / "given", url), []
    with Ranks(torch.device("cpu")) as ranks:
        trainer = make(given, tmp_path / "run", say=said.append, ranks=ranks)
        train_to_end(trainer, yaml.safe_load((given / "run.yaml").read_text()))
    kept = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert kept["data"]["sources"] == [
        {"path": f"http://127.0.0.1:{server.server_port}/{kind}/train"}
    ]
    with Ranks(torch.device("cpu")) as ranks:
        make(given, tmp_path / "run", resume=True, say=said.append, ranks=ranks)
    assert not [line for line in said if "resumed with" in line]
    shutil.rmtree(given)
    assert (leaks(tmp_path), found_secrets("".join([*said, *capsys.readouterr()]))) == ({}, [])


def test_a_run_from_python(server, tmp_path, capsys):
    source = ps.Source(server.private("train"))
    loader = ps.Loader(source, sequence_length=64, rows_per_step=4)
    assert source.name == "train"
    model = ps.build_model(layers=1, width=16, heads=2, vocab_size=400)
    run = ps.train(model, loader, steps=2, output=tmp_path / "run", threads=1)
    shown = "".join(
        map(repr, (source, ps.Source([server.signed("train")]), loader, loader.mixture, run))
    )
    shown += str(loader.explain(1)) + loader._repr_html_() + "".join(capsys.readouterr())
    assert (leaks(tmp_path), found_secrets(shown)) == ({}, [])


def test_a_server_that_refuses_a_run(server, tmp_path):
    for kind in ("private", "signed"):
        server.status["manifest.json"] = 403
        given = write_run(tmp_path / kind, getattr(server, kind)("train"))
        with pytest.raises(PenstockError, match="403") as refused:
            make(given, tmp_path / "run")
        assert found_secrets(printed(refused.value)) == []
