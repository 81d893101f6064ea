"""Experts and stochastic blocks in training: their loss and their draws follow the step, not the
rows of a pass.
"""

import pytest
import torch
from test_trainer_ranks import BLOCKS
from training_makers import losses, make, train, values

from makers.published_kernels import install
from penstock.core.errors import ConfigError
from penstock.use.config.summary import describe

pytestmark = pytest.mark.usefixtures("plain_torch")
STEPS = "training.steps=5"


@pytest.fixture
def published(monkeypatch):
    """Calls of stand-ins for published kernels."""
    return install(monkeypatch)


JOINED = (
    (
        "model.blocks={full: {}, near: {sliding_window: 8, qk_norm: true}, sparse: {experts: "
        "3, balance: 0.3}, either: {mixer: stochastic, choices: [full, near], main: full, "
        "experts: 4, balance: 0.3}}"
    ),
    "model.pattern=[either, sparse]",
)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return train(data, tmp_path_factory.mktemp("whole") / "run", STEPS, *BLOCKS)


def test_single_rows_give_the_same(data, tmp_path):
    joined, single = (
        train(data, tmp_path / str(n), STEPS, *JOINED, f"training.rows_per_pass={n}")
        for n in (4, 1)
    )
    for figure in ("loss", "gradient_norm", "experts.evenness"):
        assert values(single, figure) == pytest.approx(values(joined, figure), rel=1e-4)
    assert losses(single) != losses(joined), (
        "another order of additions rounds otherwise: were rows joined?"
    )


def test_rows_in_parts_give_the_same(data, tmp_path):
    """States and their gradients cross the cuts."""
    recurrent = (
        "model.blocks={full: {}, delta: {mixer: gated_delta}}",
        "model.pattern=[delta, full]",
    )
    whole, cut = (
        train(
            data,
            tmp_path / str(parts),
            STEPS,
            *recurrent,
            f"training.micro_sequences={parts}",
            "training.rows_per_pass=1",
        )
        for parts in (1, 4)
    )
    for figure in ("loss", "gradient_norm"):
        assert values(cut, figure) == pytest.approx(values(whole, figure), rel=1e-4)
    assert losses(whole) != losses(cut), (
        "another order of additions rounds otherwise: were rows cut?"
    )


def test_it_resumes_to_the_last_bit(data, tmp_path, whole):
    train(data, tmp_path / "run", STEPS, *BLOCKS, until=2)
    assert losses(train(data, tmp_path / "run", STEPS, *BLOCKS, resume=True)) == losses(whole)


def test_the_loss_evens_out_the_use_of_experts(data, tmp_path):
    """Only that loss: without it, the same steps leave experts less evenly used."""
    one = "model.pattern=[sparse]"
    found = {}
    for balance in (0, 3):
        blocks = (
            f"model.blocks={{sparse: {{experts: 6, experts_per_token: 1, balance: {balance}}}}}"
        )
        records = train(data, tmp_path / str(balance), "training.steps=30", blocks, one)
        found[balance] = values(records, "experts.evenness")
    assert found[0][0] == pytest.approx(found[3][0], rel=1e-3)
    assert found[3][-1] - 1 < 0.5 * (found[0][-1] - 1)


def test_another_seed_draws_others(data, tmp_path, whole):
    """With the same weights: those of a run are given."""
    trainer = make(data, tmp_path / "run", STEPS, *BLOCKS)
    model = trainer.model
    drawn = []
    for seed in (0, 1):
        for number in range(12):
            model.begin_step(seed=seed, number=number, tokens=1)
            drawn.append((seed, model._choice(0)))
    assert [c for s, c in drawn if s == 0] != [c for s, c in drawn if s == 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch._dynamo itself
def test_compiled_blocks_give_the_same(data, tmp_path, whole, monkeypatch):
    compile = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile(self, backend="eager", **options),
    )
    found = train(data, tmp_path / "run", STEPS, *BLOCKS, "training.compile=true")
    torch._dynamo.reset()
    assert values(found) == pytest.approx(values(whole), rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch._dynamo itself
def test_evaluations_leave_the_graphs_of_training(data, tmp_path, monkeypatch):
    """Held-out rows and texts have other lengths, and no gradients: run compiled, each would take
    graphs of training's, and lengths of rows would be any number for good.
    """
    compile, graphs = torch.nn.Module.compile, []

    def counted(graph, _):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile(self, backend=counted, **options),
    )
    validation = data / "data" / "validation"
    looks = (
        f"training.evaluators={{held: {{data: {validation}, every: 1}}, "
        "texts: {kind: samples, every: 1, max_tokens: 5}}"
    )
    counts, found = [], []
    for number, evaluators in enumerate(("training.evaluators={}", looks)):
        torch._dynamo.reset()
        graphs.clear()
        given = ("training.steps=6", evaluators, "training.compile=true")
        found.append(losses(train(data, tmp_path / str(number), *given)))
        counts.append(len(graphs))
    torch._dynamo.reset()
    assert 0 < counts[0] <= 2
    assert counts[1] == counts[0]
    assert found[1] == found[0]


def test_parts_of_rows_are_refused(data, tmp_path):
    with pytest.raises(ConfigError, match=r"documents.*set micro_sequences.*1"):
        make(
            data,
            tmp_path / "run",
            "training.micro_sequences=2",
            "model.blocks={a: {experts: 3}}",
            "model.pattern=[a]",
        )


RECURRENT = ("model.blocks={full: {}, delta: {mixer: gated_delta}}", "model.pattern=[delta, full]")


def test_published_kernels_by_name(data, tmp_path, published, caplog):
    """The dry run and the log say what runs; losses are torch's."""
    named = (STEPS, *RECURRENT, "training.recurrent=[fla, torch]")
    said = dict(describe(make(data, tmp_path / "dry", *named, dry_run=True), "mine"))
    assert said["recurrent operations"] == "causal_convolution by fla, gated_delta_rule by fla"
    assert "recurrent fla torch" in said["bits"]
    with caplog.at_level("INFO", "penstock.models"):
        found = train(data, tmp_path / "run", *named)
    assert (
        caplog.text.count(
            "recurrent operations: causal_convolution by fla, gated_delta_rule by fla"
        )
        == 1
    )
    assert published
    published.clear()
    plain = train(data, tmp_path / "plain", STEPS, *RECURRENT)
    assert published == []
    assert values(found, "loss") == pytest.approx(values(plain, "loss"), rel=1e-4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("training.recurrent=flash",), r"training\.recurrent"),
        (
            ("training.recurrent=[fla, fla]",),
            r"training\.recurrent must be one or several of torch, fla",
        ),
        (("training.recurrent=[]",), r"training\.recurrent must be one or several of torch, fla"),
        (
            ("training.recurrent=fla",),
            r"training\.recurrent: .*'fla' .*(not installed: pip install|runs on cuda only)",
        ),
        (
            ("training.recurrent=mamba_ssm", "training.micro_sequences=2"),
            r"mamba_ssm carries no states between the parts of a row; set micro_sequences to 1",
        ),
    ],
)
def test_kernels_that_cannot_run(data, tmp_path, given, says):
    with pytest.raises(ConfigError, match=says):
        make(data, tmp_path / "run", *RECURRENT, *given, dry_run=True)


def test_kernels_without_work(data, tmp_path, published):
    with pytest.raises(ConfigError, match=r"training\.recurrent: .*'fla'"):
        make(data, tmp_path / "run", "training.recurrent=fla", dry_run=True)
