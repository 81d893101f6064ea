"""Before its first step a training says which rows have no target and which chats are cut; at its
end, what it left out.
"""

import re

import pytest
from python_makers import SETTINGS, make_model

import penstock as ps

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture(scope="module")
def chats(data, tmp_path_factory):
    """Long chats with an answer at the end, short ones, and some without an answer."""
    documents = [[5] * 100] * 10 + [[3] * 20] * 30 + [[7] * 25] * 20
    spans = [[(90, 100, 1.0)]] * 10 + [[(10, 20, 1.0)]] * 30 + [[]] * 20
    tokenizer = ps.load_tokenizer(data / "tokenizer")
    return ps.write_dataset(
        tmp_path_factory.mktemp("notices") / "chats", documents, spans=spans, tokenizer=tokenizer
    )


def said_of(data, run, capsys, source, **options):
    loader = ps.Loader(source, sequence_length=32, rows_per_step=4, packing="none", **options)
    ps.train(make_model(data), loader, output=run, **{**SETTINGS, "progress": True})
    return [line.removeprefix("penstock: ") for line in capsys.readouterr().err.splitlines()]


def test_it_says_so_at_the_start_and_at_the_end(data, chats, tmp_path, capsys):
    lines = said_of(data, tmp_path / "run", capsys, ps.Source(chats, name="chats"))
    first, second, last = (
        next(number for number, line in enumerate(lines) if re.search(pattern, line))
        for pattern in (
            (
                r"^\d+ of \d+ rows at the beginning have no target, .* documents without a target: "
                r"\d+ of source 'chats'"
            ),
            (
                r"^source 'chats': 10 of 60 documents with loss weights are longer than a row of "
                r"32 tokens; too_long: s"
            ),
            (
                r"^parts left out: \d+ of source chats \(of documents longer than a row, without a "
                r"target after the cut\)$"
            ),
        )
    )
    steps = [number for number, line in enumerate(lines) if "loss" in line and "step" in line]
    assert first < second < min(steps, default=last) <= last


def test_it_says_nothing_where_all_is_trained(data, chats, tmp_path, capsys):
    source = ps.Source(chats, name="chats", slice=(0.17, 0.66), too_long="drop")
    lines = said_of(data, tmp_path / "run", capsys, source)
    assert not [line for line in lines if "target" in line or "left out" in line]
