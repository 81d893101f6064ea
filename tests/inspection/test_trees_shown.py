"""Prefix trees where people look at data: documents on the terminal and on a page, and origins of
pieces.
"""

import json
from io import StringIO

import pytest
from rich.console import Console

from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer
from penstock import InputRequirements, Loader, write_dataset
from penstock.data.shards import build_tree
from penstock.data.shards.memory import weight_spans
from penstock.plan.inputs import EVERYTHING
from penstock.use.inspection import Style, document_view, view_document
from penstock.use.inspection.page import page_html, payload
from penstock.use.inspection.page_model import PageData, from_dataset
from penstock.use.inspection.terminal_style import tree_view
from penstock.use.inspection.terminal_tokens import conversation_view


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    tokenizer = tiny_tokenizer(folder / "tokenizer", make_texts(100), 340)
    start = tokenizer.encode("the water ").tolist()
    answers = [
        tokenizer.encode(text).tolist() for text in ("flows in a pipe", "flows away", "stands")
    ]
    built = build_tree([start + answer for answer in answers], values={"rank": [0, 1, 2]})
    return write_dataset(
        folder / "d",
        [built.tokens, start],
        spans=[weight_spans(built.loss_weights), None],
        trees=[built.tree, None],
        tokenizer=tokenizer,
    )


def shown(view):
    console = Console(file=StringIO(), width=100, no_color=True)
    console.print(view)
    return console.file.getvalue()


def test_a_document_on_the_terminal(dataset):
    view = view_document(dataset, 0, dataset.loaded_tokenizer)
    text = shown(document_view(view, Style(Console(file=StringIO(), width=100)), 400))
    for path, answer in enumerate((" in a pipe", " away", "stands")):
        assert f"path {path}, rank {path}" in text
        assert answer.split()[-1] in text
    assert text == text.replace("no path ends here", "")
    other = shown(
        conversation_view(from_dataset(view), Style(Console(file=StringIO(), width=100)), 400)
    )
    assert "from position" in other
    assert not view_document(dataset, 1, dataset.loaded_tokenizer).branches


def test_the_drawing_has_a_line_for_each_branch(dataset):
    branches = view_document(dataset, 0, dataset.loaded_tokenizer).branches
    lines = tree_view(branches, 60).plain.splitlines()
    assert [line.strip()[0] for line in lines] == ["A", "B", "C"]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    assert indents[0] == 0 < indents[2] < indents[1]


def test_a_page_draws_the_tree(dataset):
    views = [view_document(dataset, number, dataset.loaded_tokenizer) for number in range(2)]
    data = PageData(title="trees", documents=[from_dataset(view) for view in views])
    tree, plain = payload(data)["sides"][0]["documents"]
    assert [branch[3] for branch in tree["branches"]] == [-1, 0, 0]
    assert "branches" not in plain
    assert "path 1, rank 1" in json.dumps(tree["branches"])
    assert "treeOf" in page_html(data)


def test_explain_has_a_line_for_each_branch(dataset):
    need = EVERYTHING.merge(InputRequirements(trees=True))
    loader = Loader(dataset, sequence_length=64, rows_per_step=1, requirements=need, threads=0)
    pieces = {piece.document: piece for piece in loader.explain(0)}
    assert len(pieces[0].branches) == 3
    assert str(pieces[0]).count("\n") == 3
    assert "path 2, rank 2" in str(pieces[0])
    assert pieces[1].branches == ()
