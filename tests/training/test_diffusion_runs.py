"""Runs of masked and block diffusion: rows keep documents apart, runs resume, write by unmasking,
and refuse what would read them in order.
"""

import json

import pytest
import torch
import yaml

import penstock as ps
from makers.models import tiny_model
from penstock.core.errors import ConfigError
from penstock.learn.evaluation.subject import Subject
from penstock.models.facts import DiffusionFacts, ModelFacts

MASK = "[NLU]"
OBJECTIVES = {
    "masked": {"kind": "masked_diffusion", "mask_token": MASK},
    "blocks": {"kind": "block_diffusion", "mask_token": MASK, "block": 8},
    "prefix": {"kind": "block_diffusion", "mask_token": MASK, "block": 8, "form": "prefix"},
    "filled": {
        "kind": "block_diffusion",
        "mask_token": MASK,
        "block": 8,
        "fill_blocks": True,
        "epsilon": 0.2,
    },
}


def objective_of(name):
    settings = dict(OBJECTIVES[name])
    kind = settings.pop("kind")
    return (ps.MaskedDiffusion if kind == "masked_diffusion" else ps.BlockDiffusion)(**settings)


def losses(data, name, packing, backend="auto"):
    """Sums over an epoch, in float64, and the number of rows."""
    model = tiny_model(400, dtype=torch.float64)
    loader = ps.Loader(
        ps.Source(data / "data" / "validation", objective=objective_of(name), max_epochs=1),
        sequence_length=128,
        rows_per_step=2,
        packing=packing,
        threads=0,
        requirements=model.requirements(),
    )
    total, weight, rows = 0.0, 0.0, 0
    with torch.no_grad():
        for step in loader:
            for row in step:
                total += float(ps.loss(model, model.tensors(row, backend), 1.0))
            for tokens in step.joined(2):
                weight += float(ps.loss(model, tokens, 1.0))
            rows += len(step)
    assert weight == pytest.approx(total, rel=1e-12)
    return total, rows


@pytest.mark.parametrize("name", OBJECTIVES)
def test_documents_are_apart(data, name):
    """The same losses packed and one by one, with our kernels, a dense mask and FlexAttention."""
    packed, rows = losses(data, name, "best_fit")
    alone, documents = losses(data, name, "none")
    assert documents > 1.8 * rows
    assert packed == pytest.approx(alone, rel=1e-12)
    for backend in ("dense", "flex"):
        assert losses(data, name, "best_fit", backend)[0] == pytest.approx(packed, rel=1e-12)


def write_file(folder, data, name, **training):
    path = folder / f"{name}.yaml"
    settings = {
        "data": {
            "sources": [{"path": str(data / "data" / "train"), "objective": OBJECTIVES[name]}],
            "loader": {"sequence_length": 64, "rows_per_step": 4, "seed": 1},
        },
        "model": {"layers": 2, "width": 16, "heads": 2},
        "training": {
            "steps": 6,
            "threads": 1,
            "optimizer": {"learning_rate": 0.01},
            "checkpoints": {"every": 3, "keep": 2},
            "evaluators": {
                "texts": {"kind": "samples", "every": 6, "prompts": ["the"], "max_tokens": 9},
            },
            **training,
        },
    }
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module", params=["masked", "blocks"])
def run(request, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    path = write_file(folder, data, request.param)
    return ps.train(path, output=folder / "run", progress=False)


def test_a_run_says_how_it_writes(run):
    assert len([record for record in run.metrics if "loss" in record]) == 6
    facts = json.loads((run.path / "facts.json").read_text())["diffusion"]
    blocks = run.path.parent.name.startswith("blocks")
    mask = ps.load_tokenizer(run.tokenizer).special_tokens[MASK]
    assert facts == {"mask_id": mask, "block": 8 if blocks else 0, "after_bos": blocks}
    [sample] = [record["texts/0"] for record in run.metrics if "texts/0" in record]
    assert sample.startswith("the")


def test_a_stopped_run_is_the_whole_run(data, run, tmp_path):
    """Corruption is a function of the place, so it resumes exactly."""
    name = "blocks" if run.path.parent.name.startswith("blocks") else "masked"
    path = write_file(tmp_path, data, name)
    ps.train(path, output=tmp_path / "run", progress=False, steps=3)
    whole = [record["loss"] for record in run.metrics if "loss" in record]
    resumed = ps.train(path, output=tmp_path / "run", resume=True, progress=False)
    assert [record["loss"] for record in resumed.metrics if "loss" in record] == whole


def test_it_writes_by_unmasking(run):
    greedy = run.generate("the", temperature=0, max_tokens=10)
    assert greedy == "".join(run.stream("the", temperature=0, max_tokens=10))
    assert run.generate(["the", "a"], temperature=0, max_tokens=10)[0] == greedy
    fast = run.sample("the", max_tokens=10, unmask_steps=2, samples=2, seed=3)
    assert [one.seed for one in fast] == [3, 4]
    with pytest.raises(ConfigError, match="frequency_penalty: a model that was trained by"):
        run.generate("the", frequency_penalty=1.0)
    with pytest.raises(ConfigError, match="unmask_steps"):
        run.rollouts(["a"], lambda record, answer: 1.0, output=run.path / "no", unmask_steps=2)


def test_what_reads_in_order_is_refused(run, tmp_path, data):
    for ask in (
        lambda: run.session(template="chatml"),
        lambda: run.rollouts(["a"], lambda record, answer: 1.0, output=tmp_path / "rollouts"),
        lambda: Subject(
            run._open_model({}).model, ps.load_tokenizer(run.tokenizer), context_length=64
        ),
    ):
        with pytest.raises(ConfigError, match="was trained by diffusion"):
            ask()
    with pytest.raises(ConfigError, match="was trained by diffusion, with attention in both"):
        run.export(tmp_path / "export")
    plain = tmp_path / "plain.yaml"
    settings = yaml.safe_load(write_file(tmp_path, data, "masked").read_text())
    del settings["data"]["sources"][0]["objective"]
    del settings["training"]["evaluators"]
    settings["teacher"] = {"teachers": [{"model": str(run.path)}]}
    plain.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match="a teacher: the model was trained by diffusion"):
        ps.train(plain, output=tmp_path / "student", progress=False)


def test_sources_of_two_masks_are_refused(data, tmp_path):
    path = write_file(tmp_path, data, "masked")
    settings = yaml.safe_load(path.read_text())
    [source] = settings["data"]["sources"]
    other = {**source, "name": "other", "objective": {**OBJECTIVES["blocks"]}}
    settings["data"]["sources"] = [source, other]
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match="noised with different masks or blocks"):
        ps.train(path, output=tmp_path / "run", progress=False)


def test_a_base_that_learns_to_write_in_order(data, run, tmp_path):
    """The facts are those of the last training."""
    settings = yaml.safe_load(write_file(tmp_path, data, "masked").read_text())
    settings["model"] = f"from:{run.path}"
    del settings["data"]["sources"][0]["objective"]
    path = tmp_path / "after.yaml"
    path.write_text(yaml.safe_dump(settings))
    after = ps.train(path, output=tmp_path / "after", progress=False)
    assert after.facts.diffusion is None
    assert isinstance(after.generate("the", max_tokens=3), str)


def test_facts_are_kept(tmp_path):
    facts = ModelFacts(diffusion=DiffusionFacts(mask_id=5, block=4, after_bos=True))
    facts.save(tmp_path)
    assert ModelFacts.load(tmp_path) == facts
