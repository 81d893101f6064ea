"""A dataset carries the tokenizer that made it, and says when that was changed."""

from itertools import islice

from makers.datasets import prepare_here
from makers.tokenizers import tiny_tokenizer
from penstock import Dataset, Loader
from penstock.data.shards import verify

TEXTS = ["the quick brown fox jumps over the lazy dog"] * 20


def test_a_dataset_spells_its_tokens_and_notices_another_tokenizer(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", TEXTS, 280)
    prepare_here(iter(TEXTS), tokenizer, tmp_path / "data")
    dataset = Dataset.open(tmp_path / "data")
    assert dataset.loaded_tokenizer is not None
    assert dataset.loaded_tokenizer.fingerprint == tokenizer.fingerprint
    loader = Loader(dataset, sequence_length=64, rows_per_step=1, threads=0)
    (step,) = islice(loader, 1)
    assert TEXTS[0] in (loader.explain(0, 0)[0].text or "")
    assert len(step) == 1
    assert verify(tmp_path / "data").sound
    vocabulary = tmp_path / "data" / "tokenizer" / "tokenizer.json"
    vocabulary.write_text(
        vocabulary.read_text().replace('"Ġthe"', '"Ġthx"').replace('"the"', '"thx"')
    )
    report = verify(tmp_path / "data")
    assert not report.sound
    assert any("tokenizer" in str(fault) for fault in report.faults)
