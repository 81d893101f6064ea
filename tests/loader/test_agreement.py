"""Ranks that would not read the same data are told so at the start, all of them, with the rank and
the difference.
"""

import pytest

import penstock as ps
from makers.ranks import run_processes
from makers.tokenizers import tiny_tokenizer
from penstock.core.errors import ConfigError
from penstock.plan.loader.agreement import check_ranks

DOCUMENTS = [[1, 2, 3, 4 + number % 3] for number in range(40)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dataset, a copy of it, and one with a document less."""
    folder = tmp_path_factory.mktemp("agree")
    tokenizer = tiny_tokenizer(folder / "tokenizer", ["some words"], 300)
    for name, documents in (
        ("a/c", DOCUMENTS),
        ("b/c", DOCUMENTS),
        ("less/c", DOCUMENTS[1:]),
        ("d", DOCUMENTS),
    ):
        ps.write_dataset(folder / name, documents, tokenizer=tokenizer)
    return folder


def loader(folders, data="a/c", *, share=1.0, **options):
    sources = [ps.Source(folders / data, share=share), ps.Source(folders / "d")]
    return ps.Loader(
        ps.Mixture(sources), **{"sequence_length": 16, "rows_per_step": 2, "seed": 3, **options}
    )


def compared(*loaders, more=({}, {})):
    """The words of each rank's error, which must be the same."""
    given, told = [], []
    for one, values in zip(loaders, more, strict=True):
        check_ranks(one, lambda value: given.append(value) or [value], values)
    for one in loaders:
        try:
            check_ranks(one, lambda _: given)
        except ConfigError as error:
            told.append(str(error))
        else:
            told.append("")
    assert len(set(told)) == 1
    return told[0]


def test_ranks_that_agree(folders):
    assert (
        compared(loader(folders), loader(folders, "b/c"), more=({"steps": 3}, {"steps": 3})) == ""
    )
    check_ranks(loader(folders))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seed": 4}, "seed is 3 on rank 0, 4 on rank 1"),
        ({"sequence_length": 8}, "sequence_length is 16 on rank 0, 8 on rank 1"),
        ({"packing": "concat"}, "packing is 'best_fit' on rank 0, 'concat' on rank 1"),
        (
            {"max_document_tokens": 3},
            "source 0 ('c') has another name, share, objective, slice, order or limit",
        ),
        ({"data": "less/c"}, "source 0 ('c') holds other documents"),
        (
            {"share": 3.0},
            "source 0 ('c') has another name, share, objective, slice, order or limit",
        ),
    ],
)
def test_what_differs_is_named(folders, change, difference):
    told = compared(loader(folders), loader(folders, **change))
    assert told.startswith("rank 1 does not train what rank 0 trains: ")
    assert difference in told


def test_other_values_are_compared(folders):
    told = compared(loader(folders), loader(folders), more=({"steps": 3}, {"steps": 4}))
    assert "steps is 3 on rank 0, 4 on rank 1" in told


TRAIN = """
    import os, sys
    import penstock as ps

    rank = int(os.environ["RANK"])
    loader = ps.Loader(sys.argv[1], sequence_length=16, rows_per_step=2, seed=SEED, data_parallel=(rank, 2))
    model = ps.build_model(layers=1, width=16, heads=2, vocab_size=300)
    try:
        ps.train(model, loader, steps=2, learning_rate=RATE, output=sys.argv[2], progress=False)
    except ps.PenstockError as error:
        print(error)
"""  # noqa: E501


@pytest.mark.parametrize(
    ("seed", "rate", "told"),
    [
        (
            "rank",
            "0.1",
            "rank 1 does not train what rank 0 trains: seed is 0 on rank 0, 1 on rank 1",
        ),
        (
            "0",
            "0.1 + rank",
            (
                "rank 1 does not train what rank 0 trains: training.optimizer.learning_rate is "
                "0.1 on rank 0, 1.1 on "
            ),
        ),
        ("0", "0.1", ""),
    ],
)
def test_processes_that_train_are_told_before_the_first_step(folders, tmp_path, seed, rate, told):
    code = TRAIN.replace("SEED", seed).replace("RATE", rate)
    found = run_processes(tmp_path / "train.py", code, folders / "d", tmp_path / "run", processes=2)
    assert [out.startswith(told) and bool(out) == bool(told) for out, _ in found] == [True, True], (
        found
    )
    assert (tmp_path / "run" / "checkpoints").exists() == (not told)
