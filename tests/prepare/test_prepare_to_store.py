"""Preparing into a store: the result is that of a local preparation, copied; interrupted, it goes
on.
"""

import pytest

from makers.datasets import prepare_here
from penstock import open_dataset
from penstock.core.errors import OutputError, StoreError

URL = "s3://bucket/web"


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_the_result_is_that_of_a_local_preparation(store, corpus, tokenizer, tmp_path, validation):
    options = {"validation": validation, "part_bytes": 12_000}
    prepare_here(f"{corpus}/*.jsonl", tokenizer, tmp_path / "local", **options)
    report = prepare_here(f"{corpus}/*.jsonl", tokenizer, URL, **options)
    assert report.output == URL
    split = "/train" if validation else ""
    assert open_dataset(f"{URL}{split}") == open_dataset(f"{tmp_path / 'local'}{split}")
    assert names(store.folder / "bucket" / "web") == names(tmp_path / "local")
    assert not any((tmp_path / "cache" / "prepared").iterdir())


def test_an_interrupted_copy_goes_on_without_preparing_again(store, corpus, tokenizer):
    fault = store.fail("403", 1, "lengths.u32", "PUT")
    with pytest.raises(StoreError, match=r"s3://bucket/web/lengths.u32"):
        prepare_here(f"{corpus}/*.jsonl", tokenizer, URL, part_bytes=12_000)
    assert not (store.folder / "bucket" / "web" / "manifest.json").exists()
    fault.times = 0
    store.faults.clear()
    store.forget()
    report = prepare_here(f"{corpus}/*.jsonl", tokenizer, URL, part_bytes=12_000)
    assert report.seconds is None
    assert store.count(".arrow", "PUT") == 0
    assert len(open_dataset(URL)) == report.documents


def test_a_dataset_that_is_there_is_replaced_only_on_request(store, corpus, tokenizer):
    prepare_here(f"{corpus}/*.jsonl", tokenizer, URL)
    with pytest.raises(OutputError, match=r"s3://bucket/web/manifest.json"):
        prepare_here(f"{corpus}/*.jsonl", tokenizer, URL)
    report = prepare_here(f"{corpus}/*.jsonl", tokenizer, URL, overwrite=True, add_eos="no")
    assert len(open_dataset(URL)) == report.documents
    assert open_dataset(URL).num_tokens == report.tokens
