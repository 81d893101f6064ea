"""What a run refuses, and with which words; nothing that is there is harmed by it."""

import shutil

import pytest
from training_makers import losses, make, make_data, train

from penstock.core.errors import ConfigError, OutputError, RecordError, StateError

pytestmark = pytest.mark.usefixtures("plain_torch")


def test_a_run_file_without_a_model(data, tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml: model is missing: give layers"):
        make(data, tmp_path / "run", "model=null")


def test_a_dataset_without_a_tokenizer(data, tmp_path):
    from penstock import write_dataset

    write_dataset(tmp_path / "bare", [[1, 2, 3]] * 50, vocab_size=50)
    with pytest.raises(ConfigError, match=r"tokenizer.*trained"):
        make(data, tmp_path / "run", f"data.sources=[{{path: {tmp_path / 'bare'}}}]")
    assert not (tmp_path / "run").exists()


def test_folders_that_hold_something(data, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    with pytest.raises(OutputError, match="not empty and holds no run"):
        make(data, tmp_path / "mine")
    with pytest.raises(OutputError, match="not empty and holds no run"):
        make(data, tmp_path / "mine", resume=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    train(data, tmp_path / "run", until=1)
    with pytest.raises(OutputError, match=r"run.*already.*\(--resume.*resume=True\)"):
        make(data, tmp_path / "run")


def test_resume_where_nothing_is(data, tmp_path):
    """A job that is always started with --resume begins a new run, and one that was killed early
    begins again.
    """
    for _ in range(2):
        assert make(data, tmp_path / "run", resume=True).loader.step == 0


def test_resume_with_other_data(data, tmp_path):
    train(data, tmp_path / "run", until=3)
    before = (tmp_path / "run" / "run.yaml").read_text()
    other = make_data(tmp_path / "other", number=200, seed=1)
    with pytest.raises(StateError, match="other"):
        train(other, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "run.yaml").read_text() == before


def test_resume_with_another_order(data, tmp_path):
    train(data, tmp_path / "run", until=3)
    with pytest.raises(StateError, match="seed"):
        train(data, tmp_path / "run", "data.loader.seed=2", resume=True)


@pytest.mark.parametrize(
    "assignment", ["model.width=32", "model.layers=1", "training.lora={rank: 2}"]
)
def test_resume_with_another_model(data, tmp_path, assignment):
    train(data, tmp_path / "run", until=3)
    with pytest.raises(StateError, match=r"step-00000002.*resume"):
        train(data, tmp_path / "run", assignment, resume=True)


@pytest.mark.parametrize(
    "changed",
    ["model.heads=4", "model.rope_theta=500", "model.norm_eps=0.1", "model.sliding_window=8"],
)
def test_resume_with_a_model_of_the_same_shapes(data, tmp_path, changed):
    train(data, tmp_path / "run", until=3)
    name = changed.partition("=")[0]
    with pytest.raises(StateError, match=rf"model.*{name}.*now.*resume"):
        train(data, tmp_path / "run", changed, resume=True)


def test_resume_with_another_lora_alpha(data, tmp_path):
    train(data, tmp_path / "run", "training.lora={rank: 2, alpha: 4}", until=3)
    with pytest.raises(StateError, match=r"training\.lora.*alpha=4.*alpha=8"):
        train(data, tmp_path / "run", "training.lora={rank: 2, alpha: 8}", resume=True)


def test_resume_without_the_run_that_it_began_with(data, tmp_path):
    train(data, tmp_path / "first", "training.steps=2", "training.schedule.warmup_steps=2")
    start = f'model="from:{tmp_path / "first"}"'
    whole = train(data, tmp_path / "whole", start)
    train(data, tmp_path / "run", start, until=3)
    shutil.rmtree(tmp_path / "first")
    assert losses(train(data, tmp_path / "run", start, resume=True)) == losses(whole)


def test_resume_with_another_optimizer(data, tmp_path):
    train(data, tmp_path / "run", until=3)
    with pytest.raises(StateError, match="the optimizer is muon now, adamw then"):
        train(data, tmp_path / "run", "training.optimizer.kind=muon", resume=True)


def test_what_is_overridden_on_resuming_is_told(data, tmp_path):
    train(data, tmp_path / "run", until=3)
    said: list[str] = []
    train(
        data,
        tmp_path / "run",
        "training.optimizer.learning_rate=0.02",
        resume=True,
        say=said.append,
    )
    assert any(
        "resumed with training.optimizer.learning_rate: 0.02; it was 0.01" in line for line in said
    )


def test_fewer_steps_than_are_done(data, tmp_path):
    train(data, tmp_path / "run", "training.steps=4")
    with pytest.raises(StateError, match=r"already.*step.*4.*steps.*3.*4"):
        train(data, tmp_path / "run", "training.steps=3", resume=True)


def test_a_loss_that_is_no_number(data, tmp_path):
    wild = ("training.optimizer.learning_rate=1e30", "training.optimizer.clip_norm=null")
    with pytest.raises(StateError, match=r"step \d+: .*not finite.*learning rate"):
        train(data, tmp_path / "run", *wild)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-00000004"))


def test_data_that_ends_too_early(data, tmp_path):
    ends = ("data.loader.rows_per_step=16", "data.sources.0.max_epochs=1")
    with pytest.raises(ConfigError, match=r"after \d+ steps, before 90; lower steps"):
        train(data, tmp_path / "run", "training.steps=90", *ends)


def test_what_was_trained_until_the_data_ended_is_saved(data, tmp_path):
    ends = (
        "data.loader.rows_per_step=16",
        "data.sources.0.max_epochs=1",
        "training.checkpoints.every=1000",
    )
    with pytest.raises(ConfigError, match="All that was trained is saved"):
        train(data, tmp_path / "run", "training.steps=90", *ends)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_what_was_trained_until_a_step_cannot_be_made_is_saved(data, tmp_path):
    """A document that is refused is found when its window is planned, here at the change of
    shares.
    """
    path = data / "data" / "train"
    sources = (
        f"data.sources=[{{path: {path}, name: web}}, {{path: {path}, name: long, share: 0, "
        "too_long: error}]"
    )
    change = "data.changes=[{step: 4, shares: {web: 0, long: 1}}]"
    rare = ("data.loader.sequence_length=16", "training.checkpoints.every=1000", "training.steps=9")
    said: list[str] = []
    with pytest.raises(RecordError, match=r"source.*'long'.*document.*too_long"):
        train(data, tmp_path / "run", sources, change, *rare, say=said.append)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    assert said[-1] == "saved after step 4, before the error"
    start = f'model="from:{tmp_path / "run"}"'
    assert len(train(data, tmp_path / "more", start, "training.steps=3")) == 3


@pytest.mark.parametrize("where", ["model", "evaluator"])
def test_what_was_trained_before_an_error_is_saved(data, tmp_path, where):
    """A row that the model refuses, or a look at it that fails; the run then goes on to the last
    bit.
    """
    rare, said = ("training.checkpoints.every=1000", "training.steps=6"), []
    trainer = make(data, tmp_path / "run", *rare, say=said.append)
    given, loader = trainer.model.tensors, trainer.loader

    def refuse(*arguments):
        if loader.step == 4:
            raise RecordError("not this")
        return given(*arguments) if where == "model" else {}

    if where == "model":
        trainer.model.tensors = refuse
    else:
        trainer.evaluators = {"look": (1, refuse)}
    with pytest.raises(RecordError, match="not this"):
        list(trainer.train())
    del trainer
    due = 3 if where == "model" else 4
    assert said[-1] == f"saved after step {due}, before the error"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        f"step-{due:08}"
    ]
    rest = train(data, tmp_path / "run", *rare, resume=True)
    assert losses(rest) == losses(train(data, tmp_path / "whole", *rare))[due:]


def test_no_new_beginning_over_damaged_checkpoints(data, tmp_path):
    train(data, tmp_path / "run", until=5)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for weights in (tmp_path / "run" / "checkpoints").glob("*/model/model.safetensors"):
        weights.write_bytes(b"")
    with pytest.raises(StateError, match=r"step-00000002, step-00000004.*restore"):
        train(data, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_device_that_is_not_there():
    from penstock.learn.training.distributed import local_device

    for name in ("toaster", "cuda:99"):
        with pytest.raises(ConfigError, match=rf"device.*'{name}'.*th.*auto"):
            local_device(name)


def test_neither_steps_nor_an_end(data, tmp_path):
    with pytest.raises(ConfigError, match=r"training\.steps is missing"):
        make(data, tmp_path / "run", "training.steps=null")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.steps=0", "steps must be above 0"),
        ("training.z_loss=-1", "z_loss must be 0 or more"),
        ("training.checkpoints.every=0", "every must be above 0"),
        ("training.evaluators={a: {}}", "kind loss needs data"),
        ("training.evaluators={a: {datta: x}}", "did you mean 'data'"),
        ("training.stepz=4", "did you mean 'steps'"),
        ("model=gpt2", "model 'gpt2' is unknown"),
        ("model=hf:/nowhere/at/all", "/nowhere/at/all"),
        ("model.vocab_size=5", "vocab"),
        (
            f"training.evaluators={{a: {{kind: samples, prompts: [{'the ' * 99}]}}}}",
            "evaluator 'a': prompt 'the .* tokens",
        ),
        ("training.micro_sequences=7", "micro_sequences|divisor of 64"),
    ],
)
def test_settings_that_mean_nothing(data, tmp_path, assignment, message):
    from penstock.core.errors import PenstockError

    with pytest.raises(PenstockError, match=message):
        train(data, tmp_path / "run", assignment)
