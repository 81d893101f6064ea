"""A URL is refused wherever a folder must be local, before anything is written."""

from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock import open_dataset, train_tokenizer, write_dataset
from penstock.cli import build_app
from penstock.config import load_run
from penstock.core.errors import ConfigError
from penstock.core.folders import is_url, local_path
from penstock.shards import import_corpus, open_megatron, open_npy, verify, write_megatron

MESSAGE = r"s3://bucket/data: is a URL, but .* must be a local path: object storage is not supported yet; prepare"
URL = "s3://bucket/data"


@pytest.mark.parametrize(
    "location", ["s3://a/b", "gs://a", "https://a/b", "file:///a", "memory://a", "s3:/a/b", "S3://a"]
)
def test_urls(location):
    assert is_url(location)
    assert is_url(Path(location))


@pytest.mark.parametrize("location", ["a", "/a/b", "./s3:/a", "C:/a", "a:b/c", "s3:", "..", ""])
def test_paths(location):
    assert not is_url(location)
    assert local_path(location, "a dataset") == Path(location)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to be in, which stays so."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def corpus(folder):
    np.arange(9, dtype=np.uint16).tofile(folder / "x.npy")
    return open_npy(folder / "x.npy", "uint16", 8)


USES = {
    "open_dataset": lambda url, _: open_dataset(url),
    "verify": lambda url, _: verify(url),
    "source": lambda url, _: ps.Source(url),
    "mixture": lambda url, _: ps.Mixture([url]),
    "loader": lambda url, _: ps.Loader(url, sequence_length=8, rows_per_step=1),
    "open_megatron": lambda url, _: open_megatron(url),
    "open_npy": lambda url, _: open_npy(url, "uint16", 0),
    "write_dataset": lambda url, _: write_dataset(url, [[1, 2]]),
    "import": lambda url, other: import_corpus(corpus(other), url),
    "write_megatron": lambda url, other: write_megatron(corpus(other), url),
    "prepare": lambda url, _: ps.prepare(iter(["a"]), tokenizer="absent", output=url, progress=False),
    "train_tokenizer": lambda url, _: train_tokenizer(["some text"], vocab_size=270, output=url),
}


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", USES)
def test_everything_that_takes_a_folder(here, tmp_path_factory, name, kind):
    with pytest.raises(ConfigError, match=MESSAGE):
        USES[name](kind(URL), tmp_path_factory.mktemp("other"))


@pytest.mark.parametrize(
    "line",
    [
        ["inspect", URL],
        ["verify", URL],
        ["convert", URL, "-o", "out"],
    ],
)
def test_verbs(here, line):
    with pytest.raises(ConfigError, match=MESSAGE):
        build_app(line)(args=line, standalone_mode=False)


def test_run_files(tmp_path):
    path = tmp_path / "run.yaml"
    loader = "{sequence_length: 8, rows_per_step: 1}"
    path.write_text(f"data:\n  sources: [{{path: '{URL}'}}]\n  loader: {loader}\n")
    with pytest.raises(ConfigError, match=r"is a URL, but the dataset of source 'data' must be a local path"):
        load_run(path)
