"""A loss, an evaluator, a model and `on_step` of one's own: by object, by name, resumed, and
refused in time.
"""

import importlib.util
import math
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from python_makers import SETTINGS, KillAfter, KilledError, make_loader, make_model
from training_makers import losses, make, train, values

import penstock as ps
from makers.forked import run_python
from penstock.core.errors import ConfigError, FormatError, IsolationError, StateError
from penstock.models.building import as_language_model, build_model
from penstock.models.own_code import name_of
from penstock.models.own_model import OwnModel

pytestmark = pytest.mark.usefixtures("plain_torch")
ROOT = Path(__file__).parents[2]
OWN = ROOT / "examples" / "own_code.py"


async def awaited(model, step, record):
    return 1.0


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


own = load(OWN)
SHORT = {**SETTINGS, "steps": 6}


def start(data, output, model=None, **more):
    model = make_model(data) if model is None else model
    return ps.train(model, make_loader(data), output=output, **{**SHORT, **more})


def by_hand(model, row, denominators):
    """The built-in loss, written out."""
    places = row.targets[0] >= 0
    scores = model.logits(model(row)[0][places]).log_softmax(-1)
    nats = -scores.gather(-1, row.targets[0][places, None])[:, 0]
    return (nats * row.loss_weights[0][places]).sum() / denominators[0]


def test_a_loss_by_object_is_what_is_trained_and_reported(data, tmp_path):
    plain, mine = start(data, tmp_path / "plain"), start(data, tmp_path / "mine", loss=by_hand)
    assert values(mine.metrics) == pytest.approx(values(plain.metrics), rel=1e-4)
    focal = start(data, tmp_path / "focal", loss=own.focal_loss)
    assert focal.metrics[0]["loss.cross_entropy"] == pytest.approx(
        plain.metrics[0]["loss"], rel=1e-5
    )
    assert focal.metrics[0]["loss"] < plain.metrics[0]["loss"]


def test_by_name_in_a_run_file_and_in_python(data, tmp_path):
    names = {
        "loss": f"{OWN}:focal_loss",
        "on_step": f"{OWN}:MeanWeights",
        "evaluators": {"sure": {"kind": "own", "function": f"{OWN}:calibration", "every": 3}},
    }
    python = start(data, tmp_path / "python", **names)
    look = f"{{sure: {{kind: own, function: '{OWN}:calibration', every: 3}}}}"
    file = train(
        data, tmp_path / "file", "training.steps=6", f"training.loss={OWN}:focal_loss",
        f"training.on_step={OWN}:MeanWeights", f"training.evaluators={look}",
    )  # fmt: skip
    assert losses(python.metrics) == losses(file)
    assert [record["step"] for record in file if "sure/confidence" in record] == [3, 6]


def test_a_module_of_the_working_directory(data, tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(
        "def nothing(model, row, denominators):\n    return model(row).sum() * 0\n"
    )
    monkeypatch.chdir(tmp_path)
    run = start(data, tmp_path / "run", loss="my_losses:nothing")
    assert values(run.metrics) == [0.0] * 6
    del sys.modules["my_losses"]


def test_functions_that_can_be_imported_are_written_by_name(data, tmp_path):
    assert name_of(by_hand) == "test_own_code:by_hand"
    assert name_of(lambda: None) is None
    assert name_of(KillAfter(1)) is None
    start(data, tmp_path / "run", model=ps.models.ModelSettings(layers=1), loss=by_hand)
    assert "loss: test_own_code:by_hand" in (tmp_path / "run" / "run.yaml").read_text()
    assert "python:" not in (tmp_path / "run" / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": "no colon"}, "training.loss: found 'no colon', expected module:function"),
        ({"loss": "no_such_module_here:f"}, "there is no module 'no_such_module_here'"),
        ({"loss": "nowhere.py:f"}, "there is no file nowhere.py"),
        ({"loss": f"{OWN}:focal_los"}, "has no 'focal_los'; did you mean 'focal_loss'?"),
        ({"loss": lambda model, row: 0}, "expected a function (model, row, denominators)"),
        ({"on_step": awaited}, "training.on_step: found an async function"),
        ({"loss": lambda model, row, denominators: 0.0}, "gave 0.0; expected a scalar tensor"),
        (
            {"loss": lambda model, row, denominators: model(row)},
            "gave a tensor of shape [1, 8, 16]",
        ),
        ({"loss": torch.nn.Bilinear(2, 2, 2)}, "has its own weights, which are not trained"),
        (
            {"on_step": lambda: None},
            "training.on_step: found a function (), expected a function (model, step, record)",
        ),
        ({"evaluators": {"mine": lambda: 1}}, "training.evaluators.mine: found a function ()"),
        ({"loss": by_hand, "z_loss": 1e-4}, "z_loss belongs to the built-in one"),
        ({"loss": by_hand, "micro_sequences": 2}, "micro_sequences belongs to the built-in one"),
    ],
)
def test_what_is_wrong_is_refused_before_the_run_begins(data, tmp_path, given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        start(data, tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_figures_of_ones_own_may_be_numbers_of_numpy_and_torch(data, tmp_path):
    figures = {
        "single": np.float32(0.5),
        "whole": np.int64(3),
        "tensor": torch.tensor([2.0], dtype=torch.bfloat16),
        "each": [np.float64(1.0), {"a": torch.tensor(4)}],
        "nothing": math.nan,
        "text": "words",
    }
    plain = {
        "single": 0.5, "whole": 3, "tensor": 2.0, "each": [1.0, {"a": 4}], "nothing": None,
        "text": "words",
    }  # fmt: skip
    run = start(
        data,
        tmp_path / "run",
        steps=2,
        warmup_steps=1,
        on_step=lambda model, step, record: figures,
        evaluators={"mine": lambda model, ranks: figures},
    )
    for name, value in plain.items():
        assert run.metrics[-1][name] == run.metrics[-1][f"mine/{name}"] == value


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"a": torch.zeros(2)}, "figure 'a': is tensor([0., 0.]), expected a number, a text"),
        ({"a": [object]}, "figure 'a': is <class 'object'>, expected a number, a text"),
        ({1: 2.0}, "gave a figure the name 1, expected a text"),
        (5.0, "gave 5.0, expected figures by name"),
    ],
    ids=str,
)
def test_figures_that_are_none_are_named_and_what_was_trained_is_saved(
    data, tmp_path, figures, said
):
    own = {
        "training.on_step": {"on_step": lambda model, step, record: figures},
        "training.evaluators.mine": {"evaluators": {"mine": lambda model, ranks: figures}},
    }
    for where, more in own.items():
        with pytest.raises(ConfigError, match=re.escape(f"{where}: {said}")):
            start(data, tmp_path / where, steps=2, warmup_steps=1, **more)
        assert list((tmp_path / where / "checkpoints").glob("step-*"))


def test_a_dry_run_refuses_it_too(data, tmp_path):
    with pytest.raises(ConfigError, match="has no 'focal_los'"):
        make(data, tmp_path / "run", f"training.loss={OWN}:focal_los", dry_run=True)


class Smoothed:
    """A loss with a state: it follows the mean loss."""

    def __init__(self):
        self.mean, self.weights = 0.0, torch.zeros(3)

    def __call__(self, model, row, denominators):
        share = by_hand(model, row, denominators)
        self.mean = 0.5 * self.mean + 0.5 * float(share.detach())
        self.weights += self.mean
        return share * (1 + self.mean)

    def state_dict(self):
        return {"mean": self.mean, "weights": self.weights}

    def load_state_dict(self, state):
        self.mean, self.weights = state["mean"], state["weights"]


def test_states_are_kept_in_checkpoints(data, tmp_path):
    """A trial of the loss before the run, and a kill, change nothing of its state."""
    whole = Smoothed()
    due = start(data, tmp_path / "whole", loss=whole)
    with pytest.raises(KilledError, match="after step"):
        start(data, tmp_path / "run", loss=Smoothed(), on_step=KillAfter(5))
    resumed = Smoothed()
    assert losses(start(data, tmp_path / "run", loss=resumed, resume=True).metrics) == losses(
        due.metrics
    )
    assert resumed.mean == whole.mean
    assert torch.equal(resumed.weights, whole.weights)
    with pytest.raises(StateError, match=r"state.*your.*code.*nothing"):
        start(data, tmp_path / "run", loss=by_hand, resume=True)


def test_on_step_sees_steps_and_adds_figures(data, tmp_path):
    mean = own.MeanWeights(decay=0.5)
    seen = []

    def look(model, step, record):
        seen.append((step.index, record["step"], len(step)))
        mean(model, step, record)
        return {"mine": 2.0 * record["step"]}

    run = start(data, tmp_path / "run", on_step=look)
    assert seen == [(index, index + 1, 4) for index in range(6)]
    assert values(run.metrics, "mine") == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    model = ps.load_model(run.path)
    before = model.state_dict()["norm.weight"].clone()
    mean.swap(model)
    assert not torch.equal(model.state_dict()["norm.weight"], before)


def test_a_model_by_object(data, tmp_path):
    torch.manual_seed(1)
    network = own.make_model(340)
    run = start(data, tmp_path / "run", network)
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    text = run.generate("the cat", max_tokens=5, device="cpu")
    with pytest.raises(FormatError, match=r"own_code:Gru.*load_model\(.*module="):
        ps.load_model(run.path)
    other = own.make_model(340)
    assert (
        ps.open_run(run.path, module=other).generate("the cat", max_tokens=5, device="cpu") == text
    )
    assert torch.equal(other.head.weight, network.head.weight)
    with pytest.raises(ConfigError, match="a model of your own has no layout"):
        run.export(tmp_path / "exported")


def test_a_model_by_name_is_resumed_and_opened_without_objects(data, tmp_path):
    name = f"{OWN}:make_model"
    due = start(data, tmp_path / "whole", name)
    assert losses(train(data, tmp_path / "file", f"model={name}", "training.steps=6")) == losses(
        due.metrics
    )
    with pytest.raises(KilledError, match="after step"):
        start(data, tmp_path / "run", name, on_step=KillAfter(5))
    run = ps.open_run(tmp_path / "run").resume(on_step=None, progress=False)
    assert losses(run.metrics) == losses(due.metrics)
    assert ps.open_run(tmp_path / "run").generate("a", max_tokens=3, device="cpu")
    other = start(data, tmp_path / "other", f"{OWN}:Gru", steps=1, warmup_steps=1)
    assert losses(other.metrics)[0][1] == losses(due.metrics)[0][1]


def test_code_that_came_with_a_run_is_not_run(data, tmp_path):
    run = start(data, tmp_path / "run", f"{OWN}:make_model", steps=1, warmup_steps=1)
    (run.path / "evil.py").write_text("raise SystemExit('ran')")
    described = run.model / "model.json"
    described.write_text(described.read_text().replace(str(OWN), str(run.path / "evil.py")))
    with pytest.raises(FormatError, match="code that came with it"):
        ps.load_model(run.model)


class Leaky(torch.nn.Module):
    """Sums over the whole row: documents see each other."""

    def __init__(self, vocab_size=340):
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding, self.head = (
            torch.nn.Embedding(vocab_size, 8),
            torch.nn.Linear(8, vocab_size),
        )

    def forward(self, row):
        return self.embedding(row.tokens).cumsum(0)

    def logits(self, hidden):
        return self.head(hidden)


def test_a_model_that_mixes_documents_is_refused(data, tmp_path):
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        start(data, tmp_path / "run", Leaky())
    alone = make_loader(data, packing="none")
    assert ps.train(Leaky(), alone, output=tmp_path / "alone", **SHORT).step == 6


def test_modules_that_are_no_models(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size.*None.*number"):
        as_language_model(torch.nn.Linear(2, 2))
    broken = Leaky()
    broken.logits = None
    with pytest.raises(ConfigError, match=r"Leaky: has no logits\(hidden\)"):
        as_language_model(broken)
    module = Leaky()
    assert as_language_model(module) is as_language_model(module)
    assert isinstance(as_language_model(module), OwnModel)
    file = tmp_path / "wrong.py"
    file.write_text(textwrap.dedent("def make(vocab_size):\n    return 3\n"))
    with pytest.raises(ConfigError, match=r"gave 3, expected a torch\.nn\.Module"):
        build_model(f"{file}:make", vocab_size=10)


def test_the_example_runs_as_a_script(data, tmp_path):
    path = data / "data" / "train"
    printed = run_python(OWN, path, tmp_path / "run", check=True).stdout
    confidence = ps.open_run(tmp_path / "run").metrics[-1]["calibration/confidence"]
    assert f"\n{confidence} " in f"\n{printed}"
    assert 0 < confidence < 1


def test_the_loop_of_one_page_is_the_trainer(data, tmp_path):
    """The same losses and weights, also where the page was stopped and went on."""
    page = load(ROOT / "examples" / "training_loop.py")
    assert len((ROOT / "examples" / "training_loop.py").read_text().splitlines()) <= 100
    torch.set_num_threads(1)
    path = data / "data" / "train"
    page.train(path, tmp_path / "page", until=13)
    found = page.train(path, tmp_path / "page")
    model = make_model(data, **page.SIZE)
    run = ps.train(
        model,
        make_loader(data),
        output=tmp_path / "run",
        steps=page.STEPS,
        learning_rate=page.PEAK,
        threads=1,
        warmup_steps=page.WARMUP,
        rows_per_pass=1,
        progress=False,
    )
    assert found == values(run.metrics)
    kept = torch.load(tmp_path / "page" / "checkpoint.pt")["model"]
    assert all(torch.equal(weight, kept[name]) for name, weight in model.state_dict().items())
