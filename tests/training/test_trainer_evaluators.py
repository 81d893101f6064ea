"""Evaluators: what they tell is right, and the run does not notice them."""

import itertools
import math
import os
import re
import signal

import pytest
import torch
from training_makers import losses, make, train

from makers.datasets import prepare_here
from makers.tokenizers import tiny_tokenizer
from penstock import open_dataset
from penstock.core.errors import ConfigError
from penstock.learn.training import evaluators
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.held_out_loss import HeldOutLoss
from penstock.learn.training.stop import never

pytestmark = pytest.mark.usefixtures("plain_torch")


def held_out(data, **more):
    return "{data: %s, every: 2%s}" % (  # noqa: UP031
        data / "data" / "validation",
        "".join(f", {k}: {v}" for k, v in more.items()),
    )  # noqa: RUF100, UP031


@pytest.fixture(scope="module")
def evaluated(data, tmp_path_factory):
    looks = (
        f"training.evaluators={{held: {held_out(data)}, texts: {{kind: samples, every: 3, "
        "max_tokens: 5}}"
    )
    return train(data, tmp_path_factory.mktemp("evaluated") / "run", looks, "training.steps=7")


def test_the_run_does_not_notice_them(data, tmp_path, evaluated):
    plain = train(data, tmp_path / "run", "training.steps=7", "training.evaluators={}")
    assert losses(evaluated) == losses(plain)


def test_they_come_at_their_intervals_and_at_the_end(evaluated):
    looks = {name: [r["step"] for r in evaluated if name in r] for name in ("held/loss", "texts/0")}
    assert looks == {"held/loss": [2, 4, 6, 7], "texts/0": [3, 6, 7]}
    assert all(isinstance(record["texts/0"], str) for record in evaluated if "texts/0" in record)


def test_a_look_leaves_weights_place_and_randomness(data, tmp_path):
    looks = (
        f"training.evaluators={{held: {held_out(data)}, texts: {{kind: samples, max_tokens: 5}}}}"
    )
    trainer = make(data, tmp_path / "run", looks)
    next(trainer.train())
    weights = [p.clone() for p in trainer.model.parameters()]
    state, place = torch.get_rng_state(), trainer.loader.state_dict()
    for _, look in trainer.evaluators.values():
        assert look(trainer.model, never) == look(trainer.model, never)
    assert torch.equal(torch.get_rng_state(), state)
    assert trainer.loader.state_dict() == place
    assert all(
        torch.equal(p, w) and p.grad is None
        for p, w in zip(trainer.model.parameters(), weights, strict=True)
    )


def test_a_model_is_looked_at_without_dropout(data, tmp_path):
    """And trains on with it."""
    from penstock.learn.training.evaluators import evaluate, scheduled

    model, modes = make(data, tmp_path / "run").model, []
    model.train()
    next(model.children()).eval()
    before = [module.training for module in model.modules()]
    looks = {"mode": (2, lambda model, stop: modes.append(model.training) or {"seen": 1})}
    figures, stopped = evaluate(looks, scheduled(looks, 2, False), model)
    assert (modes, model.training, figures["mode/seen"], stopped) == ([False], True, 1, [])
    assert [module.training for module in model.modules()] == before
    assert scheduled(looks, 3, False) == []


def test_loss_and_bits_per_byte_by_hand(data, tmp_path):
    """Each document alone, token by token, against the packed evaluator."""
    trainer = make(data, tmp_path / "run", f"training.evaluators={{held: {held_out(data)}}}")
    dataset = open_dataset(data / "data" / "validation")
    nats, targets = 0.0, 0
    with torch.no_grad():
        for number in range(len(dataset)):
            tokens = torch.as_tensor(dataset[number].tokens.astype("int64"))
            cache = trainer.model.new_cache(1, len(tokens))
            for now, after in itertools.pairwise(tokens):
                logits = trainer.model.extend(
                    now.view(1, 1), torch.ones(1, dtype=torch.int64), cache
                )
                nats -= float(torch.log_softmax(logits[0].double(), 0)[after])
                targets += 1
    [(_, look)] = trainer.evaluators.values()
    found = look(trainer.model)
    assert found["targets"] == targets
    assert found["loss"] == pytest.approx(nats / targets, rel=1e-5)
    text = sum(len(dataset[number].text.encode()) for number in range(len(dataset)))
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / text, rel=1e-5)


def look_at(data, trainer, rows=None):
    return HeldOutLoss(
        str(data / "data" / "validation"),
        sequence_length=trainer.loader.settings.sequence_length,
        tokenizer=trainer.loader.datasets[0].tokenizer,
        model=trainer.model,
        ranks=Ranks(torch.device("cpu")),
        rows=rows,
    )


@pytest.mark.parametrize("rows", [1, 9])
def test_no_more_rows_than_asked_for(data, tmp_path, rows):
    trainer = make(data, tmp_path / "run")
    found = look_at(data, trainer, rows)(trainer.model)
    assert "bits_per_byte" not in found
    assert (rows - 1) * 32 < found["targets"] < rows * 64


def test_data_of_another_tokenizer(data, tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer", ["other words"], 262)
    prepare_here(iter(["some words"]), tokenizer, tmp_path / "data")
    with pytest.raises(ConfigError, match=r"evaluator.*'held'.*tokenizer"):
        make(data, tmp_path / "run", f"training.evaluators={{held: {{data: {tmp_path / 'data'}}}}}")
    assert not (tmp_path / "run").exists()


def test_an_evaluation_is_given_up_when_the_run_is_asked_to_stop(data, tmp_path):
    trainer = make(data, tmp_path / "run")
    looked = []

    def stop(share=None):
        looked.append(1)
        return len(looked) > 2

    assert look_at(data, trainer)(trainer.model, stop) == {}
    assert len(looked) == 3


def figures(data, tmp_path, setting, *assignments):
    """What a look at fresh weights tells."""
    look = f"training.evaluators={{held: {setting.replace('DATA', str(data / 'data'))}}}"
    trainer = make(data, tmp_path / "run", look, *assignments, dry_run=True)
    [(_, look)] = trainer.evaluators.values()
    return look(trainer.model)


def test_a_slice_is_those_documents_alone(data, tmp_path):
    whole = figures(data, tmp_path, "{data: DATA/validation}")
    first, rest = (
        figures(data, tmp_path, f"{{data: DATA/validation, slice: {part}}}")
        for part in ("[0, 0.25]", "[0.25, 1]")
    )
    assert 0 < first["targets"] < rest["targets"]
    assert first["targets"] + rest["targets"] == whole["targets"]
    nats = sum(part["loss"] * part["targets"] for part in (first, rest))
    assert nats / whole["targets"] == pytest.approx(whole["loss"], rel=1e-6)
    assert "bits_per_byte" in whole
    assert "bits_per_byte" not in first


@pytest.mark.parametrize("too_long", ["split", "error", "drop", "truncate"])
def test_bits_per_byte_is_of_whole_documents(data, tmp_path, too_long):
    """Where long documents are left out or cut, the bytes that the manifest counts are not those of
    the targets.
    """
    length = 64 if too_long == "error" else 16
    look = f"{{sources: [{{path: DATA/validation, too_long: {too_long}}}]}}"
    found = figures(data, tmp_path, look, f"data.loader.sequence_length={length}")
    dataset = open_dataset(data / "data" / "validation")
    whole = found["targets"] == sum(
        len(dataset[number].tokens) - 1 for number in range(len(dataset))
    )
    assert whole == (too_long in ("split", "error"))
    assert ("bits_per_byte" in found) == whole


def test_an_objective_is_measured_by_its_tasks(data, tmp_path):
    plain = figures(data, tmp_path, "{data: DATA/validation}")
    found = figures(
        data, tmp_path, "{data: DATA/validation, objective: {preset: ul2r, modes: null}}"
    )
    assert set(found) == {"loss", "targets", "loss.task.R", "loss.task.X", "loss.task.S"}
    assert found["targets"] < plain["targets"]
    assert min(found[f"loss.task.{task}"] for task in "RXS") <= found["loss"]
    assert found == figures(
        data, tmp_path, "{data: DATA/validation, objective: {preset: ul2r, modes: null}}"
    )


def test_a_mixture_has_the_loss_of_its_shares(data, tmp_path):
    one, two = (
        figures(data, tmp_path, f"{{data: DATA/{name}}}") for name in ("validation", "train")
    )
    both = figures(
        data,
        tmp_path,
        "{sources: [{path: DATA/validation, share: 3}, {path: DATA/train, share: 1, name: more}]}",
    )
    assert set(both) == {"loss", "targets", "loss.source.validation", "loss.source.more"}
    assert both["targets"] == one["targets"] + two["targets"]
    assert both["loss.source.validation"] == pytest.approx(one["loss"], rel=1e-5)
    assert both["loss.source.more"] == pytest.approx(two["loss"], rel=1e-5)
    assert both["loss"] == pytest.approx((3 * one["loss"] + two["loss"]) / 4, rel=1e-5)
    assert both["loss"] != pytest.approx((one["loss"] + two["loss"]) / 2, rel=1e-7)


def test_several_prediction_heads_and_several_sources(data, tmp_path):
    """Each head's loss is told, and those of the sources are of the next token, as `loss` is."""
    both = "{sources: [{path: DATA/validation, share: 3}, {path: DATA/train, share: 1}]}"
    heads = "model.prediction_heads=2"
    found = figures(data, tmp_path, both, heads)
    one, two = (
        figures(data, tmp_path, f"{{data: DATA/{name}}}", heads) for name in ("validation", "train")
    )
    assert set(found) == {
        "loss",
        "targets",
        "loss.distance.2",
        "loss.source.validation",
        "loss.source.train",
    }
    assert found["loss.source.validation"] == pytest.approx(one["loss"], rel=1e-5)
    assert found["loss.source.train"] == pytest.approx(two["loss"], rel=1e-5)
    assert found["loss"] == pytest.approx((3 * one["loss"] + two["loss"]) / 4, rel=1e-5)
    low, high = sorted([one["loss.distance.2"], two["loss.distance.2"]])
    assert low <= found["loss.distance.2"] <= high
    assert found["loss.distance.2"] != found["loss"]


def test_parts_of_an_evaluation_are_in_the_records(data, tmp_path):
    look = (
        f"{{held: {{sources: [{{path: {data}/data/validation}}, {{path: {data}/data/train}}], "
        "every: 2}}"
    )
    records = train(data, tmp_path / "run", f"training.evaluators={look}", "training.steps=3")
    assert [record["step"] for record in records if "held/loss.source.train" in record] == [2, 3]


@pytest.mark.parametrize(
    ("look", "message"),
    [
        (
            "{a: {data: x, sources: [{path: y}]}}",
            r"evaluators.a: .*needs data, .*, or sources; found both",
        ),
        ("{a: {}}", r"evaluators.a: .*needs data, a dataset folder, or sources; found neither"),
        (
            "{a: {sources: [{path: x}], slice: [0, 0.5]}}",
            r"slice and objective go with data; give each of the sources",
        ),
        (
            "{a: {sources: [{path: x}], objective: ul2r}}",
            r"slice and objective go with data; give each of the sources",
        ),
        (
            "{a: {sources: [{path: x, share: 0}]}}",
            r"source 'x' has share 0 and .*; expected a share above 0",
        ),
        (
            "{a: {sources: [{path: x, max_epochs: 2}]}}",
            r"max_epochs 2.*; expected .* no max_epochs, as each document",
        ),
        (
            "{a: {kind: samples, slice: [0, 0.5]}}",
            r"slice goes with kind loss, and this one's is samples; leave slice",
        ),
        (
            "{a: {kind: task, task: {name: mmlu}, sources: [{path: x}]}}",
            r"sources goes with kind loss, .* is task",
        ),
        (
            "{a: {kind: task, task: {name: mmlu}, objective: ul2r}}",
            r"objective goes with kind loss, .* is task",
        ),
        (
            "{a: {kind: samples, data: x}}",
            r"data goes with kind loss, .* leave data out, or set kind to loss",
        ),
        ("{a: {data: x, prompts: [a]}}", r"prompts goes with kind samples, and this one's is loss"),
        ("{a: {data: x, slice: [0.5, 0.1]}}", r"slice must be fractions 0 ≤ begin < end ≤ 1"),
        (
            "{a: {data: x, objective: ul3}}",
            r"evaluators.a.objective: found 'ul3', expected 'causal', 'infill'",
        ),
        (
            "{a: {sources: [{path: x, shore: 1}]}}",
            r"evaluators.a.sources.0.shore: unknown key; did you mean 'share'",
        ),
    ],
)
def test_sources_of_an_evaluator_that_mean_nothing(data, tmp_path, look, message):
    with pytest.raises(ConfigError, match=message):
        make(data, tmp_path / "run", f"training.evaluators={look}")


def test_a_joined_corpus_is_measured_as_the_whole(data, tmp_path):
    """Loss by source and bits per byte, of a glob and of a list."""
    (tmp_path / "parts").mkdir()
    for name in ("train", "validation"):
        (tmp_path / "parts" / name).symlink_to(data / "data" / name)
    one, two = (
        figures(data, tmp_path, f"{{data: DATA/{name}}}") for name in ("train", "validation")
    )
    for joined in (
        "{data: PARTS/*}",
        "{sources: [{path: [DATA/train, DATA/validation], share: tokens}]}",
    ):
        both = figures(data, tmp_path, joined.replace("PARTS", str(tmp_path / "parts")))
        assert both["targets"] == one["targets"] + two["targets"]
        nats = sum(part["loss"] * part["targets"] for part in (one, two))
        assert both["loss"] == pytest.approx(nats / both["targets"], rel=1e-5)
        assert min(one["bits_per_byte"], two["bits_per_byte"]) < both["bits_per_byte"]
        assert both["bits_per_byte"] < max(one["bits_per_byte"], two["bits_per_byte"])


def stop_in(monkeypatch, calls):
    """SIGTERM arrives in these calls of the held-out loss, counted from 1."""
    evaluate, counted = HeldOutLoss.__call__, []

    def call(self, model, stop=None):
        counted.append(1)
        if len(counted) in calls:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, model, stop)

    monkeypatch.setattr(HeldOutLoss, "__call__", call)
    return counted


def with_held(data, every, steps=4):
    held, more = (
        f"{name}: {{data: {data / 'data' / 'validation'}, every: {every}, rows: 5}}"
        for name in ("held", "more")
    )
    return f"training.evaluators={{{held}, {more}}}", f"training.steps={steps}"


def plain(records):
    """What a run tells without its times."""
    timed = ("seconds", "wait_seconds", "seconds_left", "tokens_per_second", "mfu", "peak_memory")
    return [
        {name: one for name, one in record.items() if not name.endswith(timed)}
        for record in records
    ]


@pytest.mark.parametrize("every", [2, 4])
@pytest.mark.parametrize("call", [1, 2])
def test_an_evaluation_that_was_stopped_is_done_on_resume(data, tmp_path, monkeypatch, every, call):
    options, said = with_held(data, every), []
    whole = train(data, tmp_path / "whole", *options)
    with monkeypatch.context() as patch:
        stop_in(patch, {call})
        stopped = train(data, tmp_path / "run", *options, say=said.append)
    assert [record["step"] for record in stopped] == list(range(1, every + 1))
    assert ("held/loss" in stopped[-1], "held/seconds" in stopped[-1]) == (call == 2,) * 2
    assert not {"more/loss", "more/seconds"} & stopped[-1].keys()
    assert any("evaluation stopped, to be done when the run goes on" in line for line in said)
    assert any(f"stopped by SIGTERM after step {every}; resume=True" in line for line in said)
    assert plain(train(data, tmp_path / "run", *options, resume=True)) == plain(whole)
    done = stop_in(monkeypatch, set())
    assert plain(train(data, tmp_path / "run", *options, resume=True)) == plain(whole)
    assert not done, "what is in the metrics is not evaluated again"


def test_an_evaluation_that_is_stopped_again_stays_owed(data, tmp_path, monkeypatch):
    options = with_held(data, 4)
    whole = train(data, tmp_path / "whole", *options)
    with monkeypatch.context() as patch:
        stop_in(patch, {1, 2})
        for resume in (False, True):
            assert "held/loss" not in train(data, tmp_path / "run", *options, resume=resume)[-1]
    assert plain(train(data, tmp_path / "run", *options, resume=True)) == plain(whole)


def test_a_long_evaluation_says_how_far_it_is(data, tmp_path, monkeypatch):
    """After ten seconds, then whenever it has taken twice as long."""
    now, said = [0.0], []
    monkeypatch.setattr(evaluators.time, "monotonic", lambda: now[0])
    model = make(data, tmp_path / "run").model
    held = HeldOutLoss(
        str(data / "data" / "validation"),
        sequence_length=64,
        tokenizer=None,
        model=model,
        ranks=Ranks(model.device),
    )

    def later():
        now[0] += 6.0
        return False

    quiet = held(model)
    assert (
        evaluators.evaluate({"held": (1, held)}, ["held"], model, later, said.append)[0][
            "held/loss"
        ]
        == quiet["loss"]
    )
    first = re.fullmatch(r"held: (\d+)% · 0:12 elapsed · (\d+):(\d+) left", said[0])
    assert 0 < int(first[1]) < 100
    assert [line.split(" · ")[1] for line in said] == [
        "0:12 elapsed",
        "0:24 elapsed",
        "0:48 elapsed",
    ][: len(said)]
    shares = [int(re.search(r"(\d+)%", line)[1]) for line in said]
    assert shares == sorted(shares)


def test_the_share_of_problems(monkeypatch):
    said, now = [], [0.0]
    monkeypatch.setattr(evaluators.time, "monotonic", lambda: now[0])
    watched = evaluators.Watched("gsm8k", said.append, lambda: True)
    assert watched(0.1)
    now[0] = 10.0
    assert watched(0.5)
    now[0] = 19.0
    watched(0.6)
    now[0] = 300.0
    watched()
    assert said == ["gsm8k: 50% · 0:10 elapsed · 0:10 left", "gsm8k: 5:00 elapsed"]
