"""What verbs call, called from Python: run files, plans, texts, conversations, scores, curves."""

import json
from pathlib import Path

import pytest
import yaml

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.use.cli import used

SAMPLING = {"max_tokens": 5, "seed": 3, "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def plain(made):
    return ps.open_run(made / "plain")


@pytest.fixture(scope="module")
def chat(made):
    return ps.open_run(made / "chat")


def test_a_run_file_is_trained_as_the_command_does(made, plain, tmp_path, capsys):
    run = ps.train(made / "plain.yaml", output=tmp_path / "run", progress=False)
    assert capsys.readouterr().err == ""
    assert [one["loss"] for one in run.metrics] == [one["loss"] for one in plain.metrics]
    written, expected = (
        yaml.safe_load((one.path / "run.yaml").read_text()) for one in (run, plain)
    )
    assert written == expected


def test_settings_and_assignments_change_a_run_file(made, tmp_path):
    run = ps.train(
        str(made / "plain.yaml"), output=tmp_path / "run", progress=False,
        assignments=["data.loader.seed=7"], steps=2, warmup_steps=1, evaluators={},
    )  # fmt: skip
    written = yaml.safe_load((run.path / "run.yaml").read_text())
    assert written["data"]["loader"]["seed"] == 7
    assert written["training"]["schedule"] == {"warmup_steps": 1}
    assert run.step == 2
    more = ps.train(
        made / "plain.yaml", output=tmp_path / "run", progress=False, resume=True,
        assignments=["data.loader.seed=7"], steps=3, warmup_steps=1, evaluators={},
    )  # fmt: skip
    assert more.step == 3


def test_what_ps_train_cannot_do_with_a_run_file_is_refused(made, tmp_path):
    file, output = made / "plain.yaml", tmp_path / "run"
    with pytest.raises(ConfigError, match=r"training\.on_step is an object.*run file"):
        ps.train(file, output=output, on_step=lambda *_: None)
    with pytest.raises(ConfigError, match=r"loader is missing, and 'owner/name' is not a run file"):
        ps.train("owner/name", output=output)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/run.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"begun: is the folder of a run.*resume\(\).*--resume\)"):
        ps.train(tmp_path / "begun", output=output)
    with pytest.raises(ConfigError, match=r"found None, expected a ps\.Loader"):
        ps.train(ps.build_model(layers=1, width=16, heads=2, vocab_size=300), output=output)
    loader = ps.Loader(made / "text/train", sequence_length=64, rows_per_step=4)
    with pytest.raises(ConfigError, match="assignments change a run file, and there is none"):
        ps.train("owner/name", loader, output=output, assignments=["training.steps=1"])
    with pytest.raises(ConfigError, match=r"step.*did you mean"):
        ps.train(file, output=output, step=1)
    assert not output.exists()


def test_plans_of_run_files(made, tmp_path):
    assert ps.plan_run(made / "plain.yaml").steps == 6
    assert ps.plan_run(made / "plain", steps=3).steps == 3
    assert ps.plan_run(made / "plain.yaml", assignments=["training.steps=9"]).steps == 9
    planned = ps.plan_training(made / "plain.yaml", output=tmp_path / "run")
    alone = ps.plan_run(made / "plain.yaml")
    assert (planned.plan.tokens, planned.plan.sources) == (alone.tokens, alone.sources)
    assert planned.facts["planned below"] == "all 6 steps"
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="output is missing"):
        ps.plan_training(made / "plain.yaml", resume=True)


def test_texts_have_their_tokens_and_seeds(plain):
    texts = plain.sample(["a", "b"], samples=2, **SAMPLING)
    assert [(one.prompt, one.seed) for one in texts] == [("a", 3), ("a", 4), ("b", 3), ("b", 4)]
    assert [one.text for one in texts[::2]] == plain.generate(["a", "b"], **SAMPLING)
    assert "".join(plain.stream("a", **SAMPLING)) == texts[0].text
    assert all(len(one.tokens) <= 5 and one.finish_reason in ("stop", "length") for one in texts)
    assert plain.sample([]) == []
    with pytest.raises(ConfigError, match="samples must be 1 or more, got 0"):
        plain.sample("a", samples=0)
    for call in (plain.sample, plain.stream):
        with pytest.raises(ConfigError, match=r"temprature.*did you mean"):
            call("a", temprature=1)


def test_a_session_remembers(chat, plain):
    session = chat.session(system="Be brief.", **SAMPLING)
    first = "".join(session.reply("hello"))
    assert first == chat.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
        **SAMPLING,
    )
    assert not session.reads_images
    if first.strip():
        assert [one["role"] for one in session.whole()] == ["system", "user", "assistant"]
    with pytest.raises(ConfigError, match="has no chat template; set template"):
        plain.session(**SAMPLING)
    assert plain.session(template="chatml", **SAMPLING).whole() == []


def test_what_is_evaluated_is_a_task_or_the_place_of_data(made, plain, tmp_path, monkeypatch):
    (tmp_path / "held.txt").write_text("one two three")
    held = str(made / "text/validation")
    task = ps.evaluation.TaskSettings(name="bits_per_byte", data=str(tmp_path / "held.txt"))
    found = plain.evaluate(made / "text/valid*", task, device="cpu", threads=1)
    [score] = found["tasks"]
    assert score["name"] == "bits_per_byte"
    for same in (held, ps.open_dataset(held)):
        [result] = plain.evaluate(same, device="cpu", threads=1)["results"]
        assert result["loss"] == found["results"][0]["loss"]
    assert ps.evaluation.Results.from_json(score).to_json() == score
    for name, reason in {
        "gsm8": "no task 'gsm8'; known",
        "data/none": "data/none: nothing there",
        "none-*": "no dataset matches this glob",
    }.items():
        with pytest.raises(ps.PenstockError, match=reason):
            plain.evaluate(name, device="cpu", threads=1)
    # A folder with the name of a task: --data says to the command that it is data.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ps.PenstockError, match="gsm8k: nothing there"):
        plain.evaluate(Path("gsm8k"), device="cpu", threads=1)


def test_prompts_of_rollouts_may_be_a_file(plain, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "b"))
    )
    kept = [
        plain.rollouts(
            prompts, lambda _, answer: float(len(answer)), output=tmp_path / name, samples=2,
            progress=False, **SAMPLING,
        ).dataset
        for name, prompts in {"file": tmp_path / "prompts.jsonl", "texts": ["a", "b"]}.items()
    ]  # fmt: skip
    assert kept[0] == kept[1]


def test_curves_are_drawn_where_the_first_run_is(made, plain, tmp_path):
    page = ps.training.plot_runs([made / "plain", made / "chat"])
    assert page == made / "plain" / "curves.html"
    expected = page.read_bytes()
    assert plain.plot(compare=[made / "chat"]).read_bytes() == expected
    with pytest.raises(ConfigError, match="over is 'steps'; expected step or tokens"):
        plain.plot(tmp_path / "a.html", over="steps")


def test_each_module_that_is_listed_is_used():
    verbs = "".join(
        path.read_text() for path in Path(used.__file__).parent.glob("*.py") if path.stem != "used"
    )
    assert [name for name in used.__all__ if f"used.{name}." not in verbs] == []
