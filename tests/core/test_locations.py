"""A URL is refused wherever a folder must be local, before anything is written."""

from pathlib import Path

import numpy as np
import pytest

from penstock import open_dataset, train_tokenizer, write_dataset
from penstock.core.errors import ConfigError
from penstock.core.folders import is_url, local_path, normal_url
from penstock.data.shards import import_corpus, open_megatron, open_npy, write_megatron
from penstock.use.config import load_run

MESSAGE = (
    r"s3://bucket/data(\.npy)?: is a URL, but .* must be a local path; write to a local folder and "
    r"copy it to the store"
)
URL = "s3://bucket/data"


@pytest.mark.parametrize(
    "location",
    ["s3://a/b", "gs://a", "https://a/b", "file:///a", "memory://a", "s3:/a/b", "S3://a"],
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
    "open_dataset": lambda url, _: open_dataset(f"{url}.npy", dtype="uint16", eos_id=0),
    "open_megatron": lambda url, _: open_megatron(url),
    "open_npy": lambda url, _: open_npy(url, "uint16", 0),
    "write_dataset": lambda url, _: write_dataset(url, [[1, 2]]),
    "import": lambda url, other: import_corpus(corpus(other), url),
    "write_megatron": lambda url, other: write_megatron(corpus(other), url),
    "train_tokenizer": lambda url, _: train_tokenizer(["some text"], vocab_size=270, output=url),
}


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", USES)
def test_everything_that_takes_a_folder(here, tmp_path_factory, name, kind):
    with pytest.raises(ConfigError, match=MESSAGE):
        USES[name](kind(URL), tmp_path_factory.mktemp("other"))


def test_run_files(tmp_path):
    path = tmp_path / "run.yaml"
    loader = "{sequence_length: 8, rows_per_step: 1}"
    path.write_text(f"data:\n  sources: [{{path: '{URL}'}}]\n  loader: {loader}\n")
    source = load_run(path).data.sources[0]
    assert (source.path, source.name) == (URL, "data")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Path("s3://a/b"), "s3://a/b"),
        ("s3://a/b/", "s3://a/b"),
        ("file:///a/b", "file:///a/b"),
        (Path("file:///a"), "file:///a"),
        ("https://a.b/c", "https://a.b/c"),
    ],
)
def test_urls_as_users_write_them(given, expected):
    assert normal_url(given) == expected
