"""Training from Python: the steps of `penstock train`, its folder, its resume, and what is done
with a run.
"""

import json
import shutil
import signal
from dataclasses import dataclass

import pytest
import torch
import yaml
from python_makers import SETTINGS, KillAfter, KilledError, make_loader, make_model, start
from training_makers import losses, on_two_processes, train, values

import penstock as ps
from makers.processes import call_penstock
from penstock.core.errors import (
    ConfigError,
    ConversationError,
    FormatError,
    OutputError,
    StateError,
)
from penstock.learn.distillation.settings import LossSettings, TeacherSettings
from penstock.use.config import load_data, load_run
from penstock.use.config import make_loader as loader_of_file
from penstock.use.config.run_file import PYTHON

pytestmark = pytest.mark.usefixtures("plain_torch")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The records of `penstock train`."""
    return train(data, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    return start(data, tmp_path_factory.mktemp("made") / "run")


def test_python_trains_as_the_command_does(made, whole):
    assert losses(made.metrics) == losses(whole)
    assert made.step == 12


@pytest.mark.parametrize("until", [1, 5, 12])
def test_a_run_that_was_killed_goes_on_to_the_last_bit(data, tmp_path, whole, until):
    with pytest.raises(KilledError, match="after step"):
        start(data, tmp_path / "run", resume=True, on_step=KillAfter(until))
    assert losses(start(data, tmp_path / "run", resume=True).metrics) == losses(whole)


def test_a_run_that_is_there_is_not_overwritten(data, made):
    with pytest.raises(OutputError, match="a run is there already"):
        start(data, made.path)


def test_the_process_is_left_as_it_was(data, tmp_path):
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)
    state = torch.get_rng_state()
    start(data, tmp_path / "run", steps=2, warmup_steps=1)
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_settings_alone_make_a_run_that_the_command_can_resume(data, tmp_path, whole):
    """Without objects the run's file says everything."""
    settings = ps.models.ModelSettings(layers=2, width=16, heads=2)
    with pytest.raises(KilledError, match="after step"):
        ps.train(
            settings, make_loader(data), output=tmp_path / "run", on_step=KillAfter(5), **SETTINGS
        )
    # The object was only there to stop it.
    file = tmp_path / "run" / "run.yaml"
    kept = yaml.safe_load(file.read_text())
    assert list(kept.pop(PYTHON)) == ["training.on_step"]
    del kept["training"]["on_step"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(kept))
    assert load_run(tmp_path / "run.yaml").training.optimizer.learning_rate == 0.01
    assert losses(train(tmp_path, tmp_path / "run", resume=True)) == losses(whole)


def test_a_run_file_says_which_objects_it_lacks(made):
    with pytest.raises(ConfigError, match=r"Transformer, 13,712 weights.*ps\.train"):
        load_run(made.path / "run.yaml")


def test_the_data_of_a_run_can_be_looked_at_by_its_folder(data, made, tmp_path):
    """Whatever of the run a file cannot hold, unless that is the data."""
    told = json.loads(call_penstock("plan", made.path, "--steps", 3, "--json").stdout)
    plain = json.loads(call_penstock("plan", data / "run.yaml", "--steps", 3, "--json").stdout)
    assert (told["tokens"], told["sources"]) == (plain["tokens"], plain["sources"])
    rows = [
        call_penstock("inspect", path).stdout
        for path in (made.path, made.path / "run.yaml", data / "run.yaml")
    ]
    assert rows[0] == rows[1] == rows[2]
    kept = yaml.safe_load((made.path / "run.yaml").read_text())
    kept[PYTHON]["data.sources.0.objective"] = "an object of mine:Objective"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(kept))
    with pytest.raises(ConfigError, match=r"\(data.sources.0.objective"):
        load_data(tmp_path / "run.yaml")
    assert load_data(data / "run.yaml", ["data.loader.seed=7"]).loader.seed == 7


def test_resume_of_a_run(data, tmp_path, whole, capsys):
    with pytest.raises(KilledError, match="after step"):
        start(data, tmp_path / "run", on_step=KillAfter(5))
    run = ps.open_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"KillAfter.*run\.resume\(on_step=…\)"):
        run.resume(progress=False)
    done = run.resume(on_step=None, progress=False)
    assert losses(done.metrics) == losses(whole)
    with pytest.raises(StateError, match=r"already.*step.*12.*steps.*10.*12"):
        done.resume(steps=10, progress=False)
    done.resume()
    assert (
        "the run is complete at step 12; to train longer, give more steps"
        in capsys.readouterr().err
    )
    longer = done.resume(steps=14)
    assert (longer.step, values(longer.metrics, "step")) == (14, list(range(1, 15)))
    before, after = (f"{longer.metrics[step]['learning_rate']:.3g}" for step in (11, 12))
    changed = f"the learning rate changes from {before} at step 12 to {after} at step 13"
    assert changed in capsys.readouterr().err
    assert before != after


def test_a_run_says_at_its_end_which_documents_were_dropped(data, tmp_path, capsys):
    lengths = ps.open_dataset(data / "data" / "train").table.lengths[:, 0]
    source = ps.Source(data / "data" / "train", name="web", too_long="drop")
    loader = ps.Loader(source, sequence_length=int(lengths.max()) - 1, rows_per_step=4)
    ps.train(make_model(data), loader, output=tmp_path / "run", **{**SETTINGS, "progress": True})
    said = [line for line in capsys.readouterr().err.splitlines() if "documents dropped" in line]
    assert said == [
        (
            "penstock: documents dropped: 1 of source web (empty, or longer than a row with "
            "too_long: drop)"
        )
    ]


def test_resume_of_a_run_of_the_command(data, tmp_path, whole):
    train(data, tmp_path / "run", until=5)
    run = ps.open_run(tmp_path / "run").resume(progress=False)
    assert losses(run.metrics) == losses(whole)


def test_resume_with_another_plan_is_refused(data, tmp_path):
    start(data, tmp_path / "run", steps=4)
    with pytest.raises(StateError, match="seed"):
        ps.train(
            make_model(data),
            make_loader(data, seed=2),
            output=tmp_path / "run",
            resume=True,
            **SETTINGS,
        )


def test_all_that_is_trained_from_python_is_in_the_run_file(data, tmp_path):
    """A loader of many settings: the written file makes the same plan."""
    path = data / "data" / "train"
    denoise = ps.Denoise.ul2r(modes=None)
    mixture = ps.Mixture(
        [
            ps.Source(path, name="a", objective=denoise, share=2),
            ps.Source(path, name="b", slice=(0, 0.5), max_epochs=3),
        ],
        [ps.ShareChange(step=3, shares={"a": 0.5})],
    )
    loader = ps.Loader(
        mixture, sequence_length=96, rows_per_step=2, packing="next_fit", attention="document"
    )
    settings = ps.models.ModelSettings(layers=1, width=16, heads=2)
    run = ps.train(settings, loader, output=tmp_path / "run", **{**SETTINGS, "steps": 4})
    assert any(name.startswith("loss.task.") for name in run.metrics[-1])
    made = loader_of_file(load_run(run.path / "run.yaml").data)
    for mine, theirs in zip(loader, made, strict=False):
        if mine.index == 5:
            break
        assert all((a.tokens == b.tokens).all() for a, b in zip(mine, theirs, strict=True))
        assert mine.resume_state == theirs.resume_state


def test_what_does_not_fit_is_refused(data, tmp_path):
    out = {"output": tmp_path / "run", **SETTINGS}
    with pytest.raises(ConfigError, match=r"loader.*found.*'data'.*ps\.Loader"):
        ps.train(make_model(data), "data", **out)
    moved = make_loader(data).seek(2)
    with pytest.raises(ConfigError, match=r"step.*2.*run.*begins.*step.*0.*seek\(0\)"):
        ps.train(make_model(data), moved, **out)
    with pytest.raises(ConfigError, match=r"100.*data.*objectives.*need.*340"):
        ps.train(make_model(data, vocab_size=100), make_loader(data), **out)
    with pytest.raises(ConfigError, match="model: found 3, expected a model of"):
        ps.train(3, make_loader(data), **out)
    needs = ps.InputRequirements(asked_by="mine", target_distances=2)
    with pytest.raises(ConfigError, match=r"target_distances.*needs 1"):
        ps.train(make_model(data), make_loader(data, requirements=needs), **out)
    with pytest.raises(ConfigError, match=r"loader.*rank.*1.*2.*process.*rank.*1"):
        ps.train(make_model(data), make_loader(data, data_parallel=(1, 2)), **out)
    assert not (tmp_path / "run").exists()


def test_the_loader_may_ask_for_more_than_the_model_needs(data, tmp_path):
    needs = ps.InputRequirements(asked_by="mine", document_ids=True)
    seen = []

    def look(model, step, record):
        seen.append(step[0].document_ids is not None)

    start_options = {**SETTINGS, "steps": 3, "warmup_steps": 1}
    ps.train(
        make_model(data),
        make_loader(data, requirements=needs),
        output=tmp_path / "run",
        on_step=look,
        **start_options,
    )
    assert seen == [True] * 3


def test_a_stopped_run_is_saved(data, tmp_path, whole):
    def stop(model, step, record):
        if record["step"] == 5:
            signal.raise_signal(signal.SIGTERM)

    assert start(data, tmp_path / "run", on_step=stop).step == 5
    assert losses(start(data, tmp_path / "run", resume=True).metrics) == losses(whole)


def test_a_model_of_transformers(data, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=340,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    run = ps.train(model, make_loader(data), output=tmp_path / "run", **{**SETTINGS, "steps": 6})
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    kept = ps.load_model(tmp_path / "run")
    assert torch.equal(kept.inner.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_loss_of_a_step_is_the_sum_of_its_rows(data):
    model = make_model(data)
    step = next(iter(make_loader(data, requirements=model.requirements())))
    rows = [ps.loss(model, row, step.loss_denominators).item() for row in step]
    assert ps.loss(model, step).item() == pytest.approx(sum(rows))
    with pytest.raises(ConfigError, match="a row needs the denominators of its step"):
        ps.loss(model, step[0])
    with pytest.raises(ConfigError, match="a step has its own denominators"):
        ps.loss(model, step, step.loss_denominators)


def test_what_is_done_with_a_run(data, made, tmp_path):
    assert repr(made) == f"Run({str(made.path)!r}: 12 steps, rows of 64)"
    text = made.generate("the cat", max_tokens=6, device="cpu")
    assert text == made.generate(["the cat", "a"], max_tokens=6, device="cpu")[0]
    with pytest.raises(ConfigError, match=r"Run.generate.*'max_token'.*'max_tokens'"):
        made.generate("", max_token=3)
    (tmp_path / "other").mkdir()
    shutil.copyfile(made.path / "metrics.jsonl", tmp_path / "other" / "metrics.jsonl")
    page = made.plot(
        tmp_path / "curves.html", compare=[tmp_path / "other", made], smoothing=0, log_y=True
    ).read_text()
    assert page.count("<li class=") == 2  # the same run twice is one
    assert '"smoothing":0,"logX":false,"logY":true' in page
    exported = made.export(tmp_path / "exported")
    assert (exported.step, exported.context_length) == (12, 64)
    again = ps.open_run(tmp_path / "exported")
    assert "exported': a model of transformers" in repr(again)
    assert again.generate("the cat", max_tokens=6, device="cpu") == text
    with pytest.raises(ConfigError, match="is a model, not a run"):
        again.resume()
    with pytest.raises(FormatError, match="metrics"):
        _ = again.metrics


def test_lora_is_resumed_and_exported(data, made, tmp_path):
    """A run that starts from another, trains small matrices only, and is merged into the exported
    folder.
    """
    pytest.importorskip("peft")
    lora = {"steps": 6, "lora": {"rank": 2, "alpha": 4}}

    def tune(output, **more):
        return start(data, output, model=ps.load_model(made.path), **{**lora, **more})

    whole = tune(tmp_path / "whole")
    with pytest.raises(KilledError, match="after step"):
        tune(tmp_path / "run", on_step=KillAfter(3))
    run = tune(tmp_path / "run", resume=True)
    assert losses(run.metrics) == losses(whole.metrics)
    before, after = ps.load_model(made.path), ps.load_model(run.path)
    trained = {name for name, weight in after.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in after.named_parameters() if ".lora_" in name}
    frozen = {
        name.replace(".base_layer", ""): weight
        for name, weight in after.named_parameters()
        if name not in trained
    }
    assert all(torch.equal(weight, frozen[name]) for name, weight in before.named_parameters())
    run.export(tmp_path / "exported")
    exported = ps.open_run(tmp_path / "exported")
    assert ps.load_model(exported.path).lora is None
    asked = {"max_tokens": 12, "temperature": 0, "device": "cpu"}
    assert exported.generate("the cat", **asked) == run.generate("the cat", **asked)


def test_a_run_is_evaluated_on_sources(data, made):
    path = data / "data" / "validation"
    denoise = ps.Denoise.ul2r(modes=None)
    mixture = ps.Mixture(
        [
            ps.Source(path, name="plain", max_epochs=1),
            ps.Source(path, name="holes", objective=denoise, max_epochs=1),
        ]
    )
    found = made.evaluate(
        path, ps.Source(path, slice=(0, 0.5), objective=denoise), mixture, device="cpu"
    )["results"]
    assert [one["data"] for one in found] == [str(path), "validation", "plain, holes"]
    assert {"loss", "bits_per_byte"} <= found[0].keys()
    assert {"loss.task.R", "loss.task.X", "loss.task.S"} <= found[1].keys()
    assert {"loss.source.plain", "loss.source.holes", "loss.task.R"} <= found[2].keys()
    with pytest.raises(ConfigError, match="nothing to measure"):
        made.evaluate()
    with pytest.raises(ConfigError, match="gsm9k"):
        made.evaluate("gsm9k")


def test_a_run_is_evaluated_on_a_task(data, made, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sees a dog.")
    found = made.evaluate(
        "bits_per_byte", data=str(tmp_path / "text.txt"), device="cpu", output=tmp_path / "kept"
    )
    assert found["tasks"][0]["score"] > 0
    assert json.loads((tmp_path / "kept" / "results.json").read_text())["tasks"] == found["tasks"]


def test_evaluators_of_sources_and_heads(data, tmp_path):
    """Loss by source, task and prediction head, like that of training."""
    path = data / "data" / "validation"
    source = ps.Source(path, name="holes", objective=ps.Denoise.ul2r(modes=None), slice=(0, 0.5))
    looks = {
        "folder": str(path),
        "source": source,
        "mixture": ps.Mixture([ps.Source(path, name="plain"), source]),
        "settings": {"data": str(path), "rows": 2, "every": 3},
    }
    model = make_model(data, prediction_heads=2)
    more = {**SETTINGS, "steps": 6, "evaluators": looks}
    run = ps.train(model, make_loader(data), output=tmp_path / "run", **more)
    last = run.metrics[-1]
    assert {"folder/loss", "folder/bits_per_byte", "folder/loss.distance.2"} <= last.keys()
    assert {"source/loss.task.R", "source/loss.task.S", "source/loss.distance.2"} <= last.keys()
    assert {
        "mixture/loss.source.plain",
        "mixture/loss.source.holes",
        "mixture/loss.task.X",
    } <= last.keys()
    assert [record["step"] for record in run.metrics if "settings/loss" in record] == [3, 6]


def test_distill(data, tmp_path, made):
    student = make_model(data, width=8)
    more = {**SETTINGS, "steps": 6, "cross_entropy": 0.5}
    run = ps.distill(
        student,
        make_loader(data),
        teacher=str(made.path),
        loss="kl",
        output=tmp_path / "run",
        **more,
    )
    assert run.metrics[-1]["distillation"] < run.metrics[0]["distillation"]
    kept = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["teacher"]
    assert kept == {
        "cross_entropy": 0.5,
        "teachers": [{"model": str(made.path), "loss": {"kind": "kl"}}],
    }
    with pytest.raises(KilledError, match="after step"):
        ps.distill(
            make_model(data, width=8),
            make_loader(data),
            teacher=[made],
            loss="kl",
            output=tmp_path / "killed",
            on_step=KillAfter(3),
            **more,
        )
    again = ps.open_run(tmp_path / "killed").resume(on_step=None, progress=False)
    assert losses(again.metrics) == losses(run.metrics)


def test_a_teachers_own_loss_stays(data, tmp_path, made):
    """Also one that equals the default."""
    teachers = [
        TeacherSettings(model=str(made.path)),
        TeacherSettings(model=str(made.path), loss=LossSettings()),
    ]
    given = {**SETTINGS, "steps": 4, "loss": "kl", "teacher": teachers}
    ps.distill(make_model(data, width=8), make_loader(data), output=tmp_path / "run", **given)
    kept = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["teacher"]["teachers"]
    assert [one["loss"]["kind"] for one in kept] == ["kl", "p_kl"]


def test_what_is_no_teacher(data, tmp_path):
    student = make_model(data, width=8)
    for given, shown in ((None, "None"), (student, "Transformer, [0-9,]+ weights"), ([3], "an")):
        with pytest.raises(ConfigError, match=f"a teacher is {shown}.*; expected a run"):
            ps.distill(student, make_loader(data), teacher=given, output=tmp_path / "run")


RANKS = """
    import sys
    from pathlib import Path
    data, folder = (Path(one) for one in sys.argv[1:])
    import os
    import penstock as ps
    from penstock.models import ModelSettings

    place = ps.DataParallel.from_env()
    loader = ps.Loader(
        data / "data" / "train", sequence_length=64, rows_per_step=4, seed=1, data_parallel=place
    )
    model = ps.build_model(layers=2, width=16, heads=2, vocab_size=340)
    run = ps.train(
        model, loader, output=folder / "run", steps=4, threads=1, learning_rate=0.01, warmup_steps=3, progress=False
    )
    print(run.step, flush=True)
    os._exit(0)
"""  # noqa: E501


@pytest.mark.slow
def test_two_ranks(data, tmp_path):
    found = on_two_processes(tmp_path / "ranks.py", RANKS, data, tmp_path)
    assert [out for out, _ in found] == ["4\n"] * 2, found
    one = start(data, tmp_path / "one", steps=4)
    together = ps.open_run(tmp_path / "run")
    assert values(together.metrics) == pytest.approx(values(one.metrics), rel=1e-5)


def test_objectives_are_written_only_where_a_file_can_say_the_same(data):
    """States hold the repr of an objective, so a run file must give this one and no other."""
    from penstock.plan.objectives import PrefixLM, SpanCorruption
    from penstock.use.runs.run_document import plain

    def written(objective):
        objects = {}
        return plain(objective, ("objective",), objects), list(objects)

    assert written(ps.Causal()) == ("causal", [])
    assert written(ps.Denoise.ul2r()) == ({"preset": "ul2r"}, [])
    assert written(ps.Denoise.ul2(modes=None, bidirectional=False)) == (
        {"preset": "ul2", "modes": None, "bidirectional": False}, []
    )  # fmt: skip
    assert written(ps.Denoise.t5(max_length=100)) == ({"preset": "t5", "max_length": 100}, [])
    assert written(ps.Infill(rate=0.25)) == ({"kind": "infill", "rate": 0.25}, [])
    tasks, objects = written(ps.Denoise([SpanCorruption(0.2, 2.5, name="R"), PrefixLM(rate=0.5)]))
    assert tasks["tasks"][0] == {"kind": "spans", "rate": 0.2, "mean": 2.5, "name": "R"}
    assert objects == []
    # A file says 3.0 where Python says 3.
    assert written(ps.Denoise([SpanCorruption(0.2, 3)])) == ("causal", [("objective",)])


@dataclass(frozen=True)
class Backwards:
    """An objective of one's own."""

    name: str = "backwards"

    def document_limit(self, sequence_length):
        return sequence_length

    def measure(self, lengths, keys):
        return lengths

    def write(self, tokens, weights, key):
        from penstock.plan.objectives import Written

        return Written(tokens=tokens[::-1], weights=None if weights is None else weights[::-1])


def test_objects_in_the_loader_are_named_and_given_again(data, tmp_path):
    source = ps.Source(data / "data" / "train", objective=Backwards())
    loader = ps.Loader(source, sequence_length=64, rows_per_step=4)
    more = {
        **SETTINGS,
        "steps": 4,
        "evaluators": {"held": ps.Source(data / "data" / "validation", objective=Backwards())},
    }
    whole = ps.train(make_model(data), loader, output=tmp_path / "whole", **more)
    with pytest.raises(KilledError, match="after step"):
        ps.train(make_model(data), loader, output=tmp_path / "run", on_step=KillAfter(3), **more)
    kept = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    held = "training.evaluators.held.sources.0.objective"
    assert set(kept[PYTHON]) == {"data.sources.0.objective", "model", held, "training.on_step"}
    run = ps.open_run(tmp_path / "run")
    changes = {"on_step": None, "evaluators": more["evaluators"], "progress": False}
    with pytest.raises(ConfigError, match=r"run\.resume\(loader=…\)"):
        run.resume(**changes)
    with pytest.raises(ConfigError, match=r"evaluators\.held\.sources\.0\.objective"):
        run.resume(loader=loader, on_step=None)
    assert losses(run.resume(loader=loader, **changes).metrics) == losses(whole.metrics)


def test_a_run_of_chats_replies_and_one_of_texts_says_why_not(made, tmp_path):
    words = [
        {"role": "user", "content": "where does the cat sit"},
        {"role": "assistant", "content": "on the mat"},
    ]
    tokenizer = ps.train_tokenizer(
        [one["content"] for one in words],
        vocab_size=290,
        output=tmp_path / "tokenizer",
        progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    ps.prepare(
        [{"messages": words}] * 40,
        tokenizer=tmp_path / "tokenizer",
        template="chatml",
        output=tmp_path / "chats",
        processes=1,
        progress=False,
    )
    model = ps.build_model(layers=1, width=32, heads=2, vocab_size=tokenizer.vocab_size)
    loader = ps.Loader({tmp_path / "chats": 1.0}, sequence_length=128, rows_per_step=4)
    run = ps.train(
        model,
        loader,
        steps=40,
        learning_rate=1e-2,
        warmup_steps=2,
        output=tmp_path / "run",
        threads=1,
        device="cpu",
        progress=False,
    )
    assert run.chat(words[0]["content"], temperature=0, device="cpu") == "on the mat"
    whole = run.chat([*words, words[0]], temperature=0, device="cpu", stop=" the")
    assert whole == run.chat([*words, words[0]], temperature=0, device="cpu", stop=[" the", "zz"])
    several = [words[:1], [*words, words[0]], words[:1]]
    alone = [run.chat(one, temperature=1.0, seed=3, device="cpu") for one in several]
    assert run.chat(several, temperature=1.0, seed=3, device="cpu") == alone
    asked = [words[0]["content"], "where"]
    alone = [run.chat(one, temperature=0, device="cpu") for one in asked]
    assert run.chat(asked, temperature=0, device="cpu") == alone
    with pytest.raises(ConfigError, match="expected a text or a list of messages"):
        run.chat(words[0])
    with pytest.raises(
        ConversationError, match=r"Run\.chat: conversation 1: the last message .*room"
    ):
        run.chat(["a", "the mat " * 200])
    shown = run._repr_html_()
    assert "polyline" in shown
    assert f"{run.metrics[-1]['loss']:.4f}" in shown
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert "polyline" not in run._repr_html_()
    with pytest.raises(ConfigError, match=r"template.*trained.*Run\.generate"):
        made.chat("a")
    with pytest.raises(ConfigError, match="did you mean"):
        run.chat("a", temprature=0)


def test_datasets_that_were_opened_are_named_by_their_places(data, tmp_path):
    train, held = (ps.open_dataset(data / "data" / name) for name in ("train", "validation"))
    joined = ps.Source([train, str(held.path)], name="both")
    mixture = ps.Mixture([ps.Source(ps.open_dataset([train, held]), 3), joined, train])
    loader = ps.Loader(mixture, sequence_length=64, rows_per_step=4)
    watched = {"held out": {"data": held, "every": 1}}
    settings = {**SETTINGS, "steps": 1, "warmup_steps": 1, "evaluators": watched}
    run = ps.train(make_model(data), loader, output=tmp_path / "run", **settings)
    written = yaml.safe_load((run.path / "run.yaml").read_text())
    both = [str(train.path), str(held.path)]
    assert [one["path"] for one in written["data"]["sources"]] == [both, both, str(train.path)]
    assert run.resume(steps=2).step == 2
