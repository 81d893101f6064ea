"""Runs that begin with parts of another run's checkpoint: what is taken is exactly that, and all of
it is said.
"""

import json
import shutil

import pytest
import yaml
from training_makers import LENGTH, losses, make, on_two_processes, train, values

import penstock as ps
from makers.datasets import random_documents
from penstock.core.errors import ConfigError, StateError
from penstock.learn.training.checkpoints import load_checkpoint, newest_complete
from penstock.learn.training.continued import CONTINUED

pytestmark = pytest.mark.usefixtures("plain_torch")

ORDER = "data.loader.packing=next_fit"
"""Rows in the order of documents: so a new plan, from a place, has the rows of the old one."""
KEEP = "training.checkpoints.keep=20"
LONG = "training.steps=20"


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """`a`, killed after its checkpoint of step 12 of 20; `whole`, all 20 steps."""
    folder = tmp_path_factory.mktemp("continuing")
    train(data, folder / "a", ORDER, KEEP, LONG, until=13)
    train(data, folder / "whole", ORDER, LONG)
    return folder


def continued(data, runs, folder, *assignments, take=None, step=None, **options):
    """The records of a run that continues from `a`, and what it said."""
    said = []
    asked = {
        "run": str(runs / "a"),
        **({} if take is None else {"take": take}),
        **({} if step is None else {"step": step}),
    }
    records = train(
        data,
        folder,
        f"training.continue_from={json.dumps(asked)}",
        ORDER,
        LONG,
        *assignments,
        say=said.append,
        **options,
    )
    return records, said


def whole(runs):
    return ps.open_run(runs / "whole").metrics


def test_with_all_parts_it_is_the_run_that_went_on(data, runs, tmp_path):
    records, said = continued(data, runs, tmp_path / "b")
    assert losses(records) == losses(whole(runs)[12:])
    for name in ("tokens", "targets", "learning_rate"):
        assert values(records, name) == values(whole(runs)[12:], name)
    assert said[0] == f"begins with weights, optimizer, schedule, data of {runs / 'a'} at step 12"
    assert said[1].startswith("source 'train' goes on after ")
    assert said[2] == "optimizer: the state of 20 of 20 parameters is taken"
    assert said[3] == "schedule: step 13 of 20 comes next, with learning rate 0.01 (wsd)"
    kept = json.loads((tmp_path / "b" / CONTINUED).read_text())
    assert (kept["run"], kept["step"], kept["take"]) == (
        str(runs / "a"), 12, ["weights", "optimizer", "schedule", "data"],
    )  # fmt: skip
    assert (tmp_path / "b" / "checkpoints" / "step-00000020" / CONTINUED).read_text() == (
        tmp_path / "b" / CONTINUED
    ).read_text()


def test_from_an_earlier_checkpoint(data, runs, tmp_path):
    records, _ = continued(data, runs, tmp_path / "b", step=6)
    assert losses(records) == losses(whole(runs)[6:])


def test_killed_and_resumed(data, runs, tmp_path):
    """After its first checkpoint it needs neither the other run nor to be told of it again."""
    for name, until in (("at once", 13), ("later", 17)):
        copy = tmp_path / f"a of {name}"
        shutil.copytree(runs / "a", copy)
        asked = f"training.continue_from={copy}"
        train(data, tmp_path / name, asked, ORDER, LONG, until=until)
        # Step 13 is before the first checkpoint of the new run, which begins again.
        if until > 14:
            shutil.rmtree(copy)
        said = []
        records = train(data, tmp_path / name, ORDER, LONG, resume=True, say=said.append)
        assert losses(records) == losses(whole(runs)[12:])
        assert not any("continue_from" in sentence for sentence in said)
        kept = yaml.safe_load((tmp_path / name / "run.yaml").read_text())["training"][
            "continue_from"
        ]
        assert kept == asked.partition("=")[2]


def test_begun_again_it_takes_the_checkpoint_that_it_began_with(data, runs, tmp_path):
    copy = tmp_path / "a"
    shutil.copytree(runs / "a", copy)
    asked = f"training.continue_from={copy}"
    train(data, tmp_path / "b", asked, ORDER, LONG, until=13)
    train(data, copy, ORDER, KEEP, LONG, resume=True)
    assert losses(train(data, tmp_path / "b", asked, ORDER, LONG, resume=True, until=13)) == losses(
        whole(runs)[12:13]
    )
    shutil.rmtree(copy / "checkpoints" / "step-00000012")
    with pytest.raises(StateError, match=r"checkpoint.*step.*12.*2.*begin"):
        make(data, tmp_path / "b", ORDER, LONG, resume=True)
    shutil.copytree(copy / "checkpoints" / "step-00000014", copy / "checkpoints" / "step-00000012")
    manifest = copy / "checkpoints" / "step-00000012" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 14', '"step": 12'))
    with pytest.raises(StateError, match=r"checkpoint.*began"):
        make(data, tmp_path / "b", ORDER, LONG, resume=True)


def test_a_chain_of_runs(data, runs, tmp_path):
    continued(data, runs, tmp_path / "b", until=17)
    said = []
    records = train(
        data,
        tmp_path / "c",
        f"training.continue_from={tmp_path / 'b'}",
        ORDER,
        LONG,
        say=said.append,
    )
    assert losses(records) == losses(whole(runs)[16:])


def test_what_is_not_taken_begins_anew(data, runs, tmp_path):
    checkpoint = load_checkpoint(runs / "a" / "checkpoints" / "step-00000012")
    records, said = continued(
        data, runs, tmp_path / "weights", "training.steps=3", take=["weights"]
    )
    assert said[0].endswith("at step 12; not taken, so started fresh: optimizer, schedule, data")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0]["tokens"] == whole(runs)[0]["tokens"]
    assert records[0]["learning_rate"] == pytest.approx(0.01 / 3)
    by_weights = make(
        data,
        tmp_path / "x",
        ORDER,
        f"training.continue_from={{run: {runs / 'a'}, take: [weights]}}",
    )
    for name, weight in load_weights(checkpoint).items():
        assert (by_weights.model.state_dict()[name] == weight).all()
    assert not by_weights.state.optimizers.state_tensors()

    of_data, said = continued(data, runs, tmp_path / "data", "training.steps=3", take=["data"])
    assert "goes on after" in said[1]
    assert len(said) == 2
    assert of_data[0]["loss"] > 5
    assert values(of_data, "targets")[0] == whole(runs)[12]["targets"] - whole(runs)[11]["targets"]

    scheduled, _ = continued(data, runs, tmp_path / "schedule", take=["schedule"])
    assert values(scheduled, "learning_rate") == values(whole(runs)[12:], "learning_rate")
    assert scheduled[0]["loss"] > 5
    # Of the beginning of the data.
    assert scheduled[0]["tokens"] - whole(runs)[11]["tokens"] == whole(runs)[0]["tokens"]


def load_weights(checkpoint):
    return ps.load_model(checkpoint.part("model")).state_dict()


def test_another_constant_number_of_rows(data, runs, tmp_path):
    """The same rows, divided into larger steps."""
    records, _ = continued(
        data, runs, tmp_path / "b", "data.loader.rows_per_step=8", "training.steps=14"
    )
    assert (
        records[0]["targets"] - whole(runs)[11]["targets"]
        == whole(runs)[13]["targets"] - whole(runs)[11]["targets"]
    )


def test_parameters_that_are_new_begin_without_a_state(data, runs, tmp_path):
    asked = f"training.continue_from={{run: {runs / 'a'}, take: [optimizer, schedule]}}"
    trainer = make(
        data, tmp_path / "b", asked, ORDER, LONG, "model.layers=3", say=(said := []).append
    )
    assert "optimizer: the state of 20 of 29 parameters is taken" in said
    [fresh] = [sentence for sentence in said if "begin without a state" in sentence]
    assert fresh.startswith(
        "optimizer: parameters that begin without a state, new or of another shape: blocks.2."
    )
    assert fresh.endswith(" and 3 more")
    state = trainer.state.optimizers.state_tensors()
    then = load_checkpoint(runs / "a" / "checkpoints" / "step-00000012").tensors(
        "optimizer.safetensors"
    )
    for name, one in state.items():
        if "blocks.2." in name:
            assert not one.any()
        else:
            assert (one == then[name]).all()
    smaller = make(
        data, tmp_path / "c", asked, ORDER, LONG, "model.layers=1", say=(said := []).append
    )
    assert len(smaller.state.optimizers.state_tensors()) == 3 * 11
    assert any("parameters that are no longer trained: blocks.1." in sentence for sentence in said)
    wider = make(
        data, tmp_path / "d", asked, ORDER, LONG, "model.mlp_width=40", say=(said := []).append
    )
    assert any("of another shape: blocks.0.mlp" in sentence for sentence in said), said
    assert wider.loader.step == 12


@pytest.mark.parametrize(
    ("assignments", "told"),
    [
        (
            ("model.layers=3",),
            (
                r"is of another model: weight blocks\.2\.\S+ is missing there, \[.*\] now; give "
                r"the model"
            ),
        ),
        (("model.heads=4",), r"model\.heads is 2 there, 4 now"),
        (
            ("training.optimizer.kind=muon",),
            "the optimizer is muon now, adamw then; take that, or leave optimizer out",
        ),
        (
            ("training.steps=12",),
            "training.steps is 12, and the schedule of .* goes on after step 12",
        ),
        (("data.loader.seed=2",), "source 'train' cannot go on where it stood: seed was 1, is 2"),
        (
            ("training.continue_from.step=7",),
            "has no checkpoint of step 7; there are 2, 4, 6, 8, 10, 12",
        ),
        (("training.continue_from.run=nowhere",), "nowhere is no run with a checkpoint"),
        (
            ("training.continue_from.take=[]",),
            "must be one or several of weights, optimizer, schedule, data, got none",
        ),
        (("training.continue_from.take=[weight]",), r"continue_from\.take\.0: found 'weight'"),
        (("training.continue_from.run=''",), "continue_from.run is empty"),
    ],
)
def test_what_is_refused_before_a_folder_is_made(data, runs, tmp_path, assignments, told):
    asked = f"training.continue_from={{run: {runs / 'a'}}}"
    with pytest.raises((ConfigError, StateError), match=told):
        make(data, tmp_path / "b", asked, ORDER, LONG, *assignments)
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_without_a_place(data, runs, tmp_path):
    copy = tmp_path / "a"
    shutil.copytree(runs / "a", copy)
    folder = copy / "checkpoints" / "step-00000012"
    state = json.loads((folder / "state.json").read_text())
    del state["place"]
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    from penstock.learn.training.checkpoints import digest

    manifest["files"]["state.json"] = {
        "bytes": (folder / "state.json").stat().st_size, "sha256": digest(folder / "state.json"),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StateError, match=r"seen.*continue_from"):
        make(data, tmp_path / "b", f"training.continue_from={copy}", ORDER, LONG)
    make(
        data,
        tmp_path / "b",
        f"training.continue_from={{run: {copy}, take: [weights]}}",
        ORDER,
        LONG,
    )


def test_another_beginning_is_refused_on_a_resume(data, runs, tmp_path):
    continued(data, runs, tmp_path / "b", until=14)
    for asked, told in (
        ({"run": str(runs / "whole")}, "whole at step 12"),
        ({"run": str(runs / "a"), "step": 10}, "at step 10"),
        ({"run": str(runs / "a"), "take": ["weights"]}, r"at step 12 \(weights\)"),
    ):
        with pytest.raises(StateError, match=rf"from {runs / 'a'} at step 12 .*{told}"):
            make(
                data,
                tmp_path / "b",
                f"training.continue_from={json.dumps(asked)}",
                ORDER,
                LONG,
                resume=True,
            )
    with pytest.raises(StateError, match=r"itself.*continue"):
        make(data, runs / "whole", f"training.continue_from={runs / 'a'}", ORDER, LONG, resume=True)


def test_a_model_that_is_left_out_is_that_of_the_run(data, runs, tmp_path):
    text = (data / "run.yaml").read_text().replace("model: {layers: 2, width: 16, heads: 2}\n", "")
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "run.yaml").write_text(text)
    asked = (f"training.continue_from={runs / 'a'}", ORDER, LONG)
    assert losses(train(folder, tmp_path / "b", *asked, until=15)) == losses(whole(runs)[12:15])
    assert losses(train(folder, tmp_path / "b", *asked, resume=True)) == losses(whole(runs)[12:])
    with pytest.raises(ConfigError, match=r"missing.*weights.*continue_from"):
        make(
            folder,
            tmp_path / "c",
            f"training.continue_from={{run: {runs / 'a'}, take: [data]}}",
            ORDER,
            LONG,
        )
    with pytest.raises(ConfigError, match="model is missing"):
        make(folder, tmp_path / "c", ORDER, LONG)


def test_a_dry_run_checks_and_writes_nothing(data, runs, tmp_path):
    asked = f"training.continue_from={runs / 'a'}"
    trainer = make(data, tmp_path / "b", asked, ORDER, LONG, dry_run=True, say=(said := []).append)
    assert any("begins with weights, optimizer, schedule, data" in sentence for sentence in said)
    assert trainer.loader.step == 12
    assert not (tmp_path / "b").exists()


def test_more_sources_and_a_learning_rate_that_goes_on(data, runs, tmp_path):
    """From Python: the model of the run, its rate, and another source next to the one that goes
    on.
    """
    tokenizer = ps.load_tokenizer(data / "tokenizer")
    ps.write_dataset(tmp_path / "more", random_documents(50, 5, 30, below=300), tokenizer=tokenizer)
    sources = [ps.Source(data / "data" / "train", 0.5), ps.Source(tmp_path / "more", 0.5)]
    loader = ps.Loader(sources, sequence_length=LENGTH, rows_per_step={0: 4, 15: 8}, seed=1)
    run = ps.train(
        None,
        loader,
        output=tmp_path / "b",
        continue_from=str(runs / "a"),
        steps=18,
        threads=1,
        progress=False,
    )
    records = run.metrics
    assert [record["step"] for record in records] == [13, 14, 15, 16, 17, 18]
    assert values(records, "learning_rate")[0] == 0.01
    assert "loss.source.more" in records[0]
    tokens = [
        now - before
        for before, now in zip(
            [whole(runs)[11]["tokens"], *values(records, "tokens")],
            values(records, "tokens"),
            strict=False,
        )
    ]
    assert min(tokens[3:]) > 1.5 * max(tokens[:3])
    again = run.resume(steps=20, progress=False)
    assert again.step == 20
    assert newest_complete(tmp_path / "b" / "checkpoints").step == 20


def test_lora_goes_on_as_lora(data, runs, tmp_path):
    lora = ("training.lora={rank: 2}", f"model=from:{runs / 'whole'}")
    train(data, tmp_path / "whole", *lora, ORDER)
    train(data, tmp_path / "a", *lora, ORDER, until=7)
    records = train(
        data, tmp_path / "b", *lora, ORDER, f"training.continue_from={tmp_path / 'a'}", until=9
    )
    assert losses(records) == losses(ps.open_run(tmp_path / "whole").metrics[6:9])
    records = train(data, tmp_path / "b", *lora, ORDER, resume=True)
    assert losses(records) == losses(ps.open_run(tmp_path / "whole").metrics[6:])
    with pytest.raises(StateError, match=r"is of another model: .*leave weights out"):
        make(data, tmp_path / "c", lora[1], ORDER, f"training.continue_from={tmp_path / 'a'}")


SHARDED = """
    import json, os, sys
    from pathlib import Path
    import torch
    from penstock.learn.training.distributed import Ranks
    from training_makers import train

    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    options = ("data.loader.packing=next_fit", "training.steps=8", "training.checkpoints.keep=9")
    said = []
    with Ranks(torch.device("cpu")) as ranks:
        def run(name, *more, **given):
            train(data, folder / name, *options, *more, ranks=ranks, say=said.append, **given)
            ranks.barrier()
        run("whole", "training.shard=true")
        run("a", "training.shard=true", until=5)
        taken = f"training.continue_from={folder}/a"
        run("b", "training.shard=true", taken, until=7)
        run("b", "training.shard=true", resume=True)
        run("copied", taken)
        run("copied a", until=5)
        run("from copied", "training.shard=true", f"training.continue_from={folder}/copied a")
        run("deeper", "training.shard=true", "model.layers=3", "training.steps=5",
            f"training.continue_from={{run: {folder}/a, take: [optimizer, schedule, data]}}")
    print(json.dumps(said), flush=True)
    os._exit(0)
"""


@pytest.mark.slow
def test_sharded_over_two_processes(data, tmp_path):
    (out, _), _ = on_two_processes(tmp_path / "script.py", SHARDED, data, tmp_path)
    said = json.loads(out.strip().splitlines()[-1])
    due = ps.open_run(tmp_path / "whole").metrics
    assert losses(ps.open_run(tmp_path / "b").metrics) == losses(due[4:])
    for name in ("copied", "from copied"):
        found = ps.open_run(tmp_path / name).metrics
        assert values(found, "step") == values(due[4:], "step")
        assert values(found) == pytest.approx(values(due[4:]), rel=1e-5)
    assert (tmp_path / "a/checkpoints/step-00000004/optimizer.shards").exists()
    assert "optimizer: the state of 20 of 29 parameters is taken" in said
    # One process reads what two have sharded.
    one = train(
        data,
        tmp_path / "one",
        ORDER,
        "training.steps=8",
        f"training.continue_from={tmp_path / 'a'}",
    )
    assert values(one) == pytest.approx(values(due[4:]), rel=1e-5)
