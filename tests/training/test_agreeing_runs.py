"""Run files, weights, teachers and evaluation data that differ between ranks are named on all of
them at the start.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from training_makers import last_json, make_data, on_two_processes, train

import penstock as ps
from penstock.learn.training.agreement import bits_notices, digest_of, weights_digest

pytestmark = pytest.mark.usefixtures("plain_torch")

SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import torch
    from penstock.core.errors import PenstockError
    from penstock.learn.training.distributed import Ranks
    from training_makers import make

    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    said = {}
    with Ranks(torch.device("cpu")) as ranks:
        for number, (name, *by_rank) in enumerate(json.loads(sys.argv[3])):
            notices = []
            try:
                make(data, folder / str(number), *by_rank[ranks.place.rank], ranks=ranks, say=notices.append)
            except PenstockError as error:
                said[name] = f"{type(error).__name__}: {error}"
            else:
                said[name] = " | ".join(one for one in notices if "ranks compute differently" in one)
    print(json.dumps(said), flush=True)
    os._exit(0)
"""  # noqa: E501


def cases(data, folder):
    """Name, and the assignments of both ranks."""
    held = "training.evaluators={{held: {{data: {}}}}}"
    taught = "teacher={{teachers: [{{model: {}, loss: {{kind: kl}}}}]}}"
    for rank in (0, 1):
        (folder / f"machine-{rank}").mkdir()
        (folder / f"machine-{rank}" / "mine.py").write_text(
            f"def loss(model, row, denominators): return {rank}"
        )
    return [
        ("nothing", [], []),
        (
            "rate",
            ["training.optimizer.learning_rate=0.1"],
            ["training.optimizer.learning_rate=0.2"],
        ),
        ("width", [], ["model.width=32"]),
        ("first weights", [], ["training.seed=5"]),
        ("plan", [], ["data.loader.seed=5"]),
        ("steps", ["training.steps=3"], ["training.steps=4"]),
        (
            "other documents",
            [],
            [f"data.sources.0.path={data}/data/validation", "data.sources.0.name=train"],
        ),
        ("no data", [], [f"data.sources.0.path={data}/data/nothing"]),
        ("saving", [], ["training.checkpoints.every=3"]),
        ("one evaluates", [], [held.format(data / "data" / "validation")]),
        ("evaluation", *([held.format(data / "data" / name)] for name in ("validation", "train"))),
        ("a copy", *([held.format(data / "data" / name)] for name in ("validation", "copy"))),
        ("teacher", *([taught.format(folder / name)] for name in ("long/run", "short/run"))),
        (
            "same teacher",
            *([taught.format(folder / name)] for name in ("long/run", "long/../long/run")),
        ),
        ("no teacher", [], [taught.format(folder / "long/run")]),
        ("weights", *([f"model=from:{folder / name}"] for name in ("long/run", "short/run"))),
        ("code", *([f"training.loss={folder}/machine-{rank}/mine.py:loss"] for rank in (0, 1))),
        ("threads", ["training.threads=1"], ["training.threads=2"]),
    ]


TRAINS = "ConfigError: rank 1 does not train what rank 0 trains: "


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Case → what each of the ranks said."""
    folder = tmp_path_factory.mktemp("agreeing")
    data = make_data(folder / "here")
    (folder / "here" / "data" / "copy").symlink_to(folder / "here" / "data" / "validation")
    for name, steps in (("long", 4), ("short", 3)):
        train(data, folder / name / "run", f"training.steps={steps}")
    ended = on_two_processes(
        folder / "script.py", SCRIPT, data, folder / "runs", json.dumps(cases(data, folder))
    )
    return [last_json(out) for out, _ in ended]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("rate", f"{TRAINS}training.optimizer.learning_rate is 0.1 on rank 0, 0.2 on rank 1. "),
        ("width", f"{TRAINS}model.width is 16 on rank 0, 32 on rank 1. "),
        ("first weights", f"{TRAINS}training.seed is 0 on rank 0, 5 on rank 1. "),
        ("plan", f"{TRAINS}seed is 1 on rank 0, 5 on rank 1. "),
        ("steps", f"{TRAINS}training.steps is 3 on rank 0, 4 on rank 1. "),
        ("other documents", f"{TRAINS}source 0 ('train') holds other documents. "),
        ("saving", f"{TRAINS}training.checkpoints.every is 2 on rank 0, 3 on rank 1. "),
        (
            "one evaluates",
            (
                f"{TRAINS}training.evaluators.held is not there on rank 0, EvaluatorSettings on "
                "rank 1. "
            ),
        ),
        ("evaluation", f"{TRAINS}training.evaluators.held: documents of 'held out' is "),
        ("teacher", f"{TRAINS}teacher.teachers.0: weights is "),
        ("no teacher", f"{TRAINS}teacher is None on rank 0, DistillationSettings on rank 1. "),
        ("weights", f"{TRAINS}the initial weights is "),
        ("code", f"{TRAINS}training.loss is "),
    ],
)
def test_all_ranks_are_told_what_differs(said, case, told):
    assert [one[case][: len(told)] for one in said] == [told, told]


@pytest.mark.parametrize("case", ["nothing", "a copy", "same teacher"])
def test_ranks_that_agree(said, case):
    assert [one[case] for one in said] == ["", ""]


def test_data_that_one_machine_lacks(said):
    first, second = (one["no data"] for one in said)
    assert second.startswith("FormatError: ")
    assert "source 'nothing'" in second
    assert first == f"DistributedError: rank 1 failed: {second.removeprefix('FormatError: ')}"


def test_other_bits_are_a_notice(said):
    for one in said:
        assert one["threads"].startswith(
            "ranks compute differently: threads is 1 on rank 0, 2 on rank 1; "
        )


def test_notices_name_a_few_ranks():
    bits = [{"torch": "2.13", "threads": 1}, *({"torch": "2.12", "threads": 1} for _ in range(6))]
    (notice,) = bits_notices(bits)
    assert (
        "torch is 2.13 on rank 0, 2.12 on rank 1, 2.12 on rank 2, 2.12 on rank 3, 2.12 on "
        "rank 4 and 2 more" in notice
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_weights_digest(dtype):
    """Any value, name, shape or dtype changes it; the order of weights does not."""
    one = {"a": torch.arange(13).to(dtype), "b": torch.ones(3, 5).to(dtype)}
    same = {"b": one["b"].clone(), "a": one["a"].clone()}
    assert weights_digest(one) == weights_digest(same)
    changed = [
        {**one, "a": torch.arange(13).flip(0).to(dtype)[1:]},
        {**one, "b": one["b"].T.contiguous()},
        {"a": one["a"], "c": one["b"]},
        {**one, "b": torch.zeros(3, 5).to(dtype)},
        {**one, "a": torch.cat((one["a"][:12], torch.zeros(1).to(dtype)))},
    ]
    assert len({weights_digest(each) for each in (one, *changed)}) == 6


def test_digest_of_objects_leaves_out_their_places():
    assert digest_of([SimpleNamespace(a=object())]) == digest_of([SimpleNamespace(a=object())])
    assert digest_of([1, "2"]) != digest_of([1, "3"])


def test_a_single_process_compares_nothing(data, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.learn.training.trainer.contents", lambda *_: 1 / 0)
    assert ps.open_dataset(data / "data" / "train")
    assert train(data, tmp_path / "run", "training.steps=3")
