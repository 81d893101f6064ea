"""The Trainer: exact resume, exact loss, finite and endless loaders, evaluation, and what it
refuses.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import make_dataset, make_loader, make_model
from training_run import train_once

import penstock as ps
from penstock import Loader
from penstock.core.errors import ConfigError, DistributedError, IsolationError, StateError


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fills four steps of four rows and one row more."""
    return make_dataset(tmp_path_factory.mktemp("trainer") / "small", documents=29, seed=2)


def arguments(folder: Path, **settings: Any) -> Any:
    return transformers.TrainingArguments(
        str(folder),
        **{"max_steps": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True, **settings},
    )


def make_trainer(
    folder: Path, loader: Loader, model: Any = None, *, settings: Any = None, **kwargs: Any
) -> Any:
    model = make_model() if model is None else model
    return ps.huggingface.Trainer(
        model, arguments(folder, **(settings or {})), loader=loader, **kwargs
    )


# -- resume
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "packing"), [(1, "best_fit"), (0, "concat")])
def test_resumed_anywhere_equals_uninterrupted(
    tmp_path: Path, weighted: Path, threads: int, packing: str
) -> None:
    """Batches, losses and weights, bit for bit, after every step; with dropout, so that generators
    count too.
    """

    def train(resume: str | None = None) -> dict[str, Any]:
        model = make_model(attention_dropout=0.3)
        return train_once(
            str(weighted),
            str(tmp_path),
            max_steps=5,
            save_steps=1,
            resume=resume,
            model=model,
            threads=threads,
            packing=packing,
        )

    whole = train()
    for step in range(1, 5):
        resumed = train(str(tmp_path / f"checkpoint-{step}"))
        assert resumed["seen"] == whole["seen"][4 * step :]
        assert resumed["losses"] == whole["losses"]
        assert resumed["weights"] == whole["weights"]
        assert resumed["epochs"] == whole["epochs"] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert len(whole["seen"]) == 20
    assert whole["loader_step"] == 5


def test_resuming_goes_on_from_the_last_checkpoint(tmp_path: Path, weighted: Path) -> None:
    whole = train_once(str(weighted), str(tmp_path), max_steps=4, save_steps=3)
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = train_once(str(weighted), str(tmp_path), max_steps=4, save_steps=3, resume=True)  # type: ignore[arg-type]
    assert resumed["seen"] == whole["seen"][12:]


@pytest.mark.parametrize("moment", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_checkpoint_at_any_moment_of_a_step_resumes_exactly(
    tmp_path: Path, weighted: Path, moment: str
) -> None:
    """As transformers' just-in-time checkpoints do when a machine is taken away."""

    class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]
        def act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer._save_checkpoint(trainer.model, None)
                control.should_training_stop = True

    setattr(Interrupt, moment, Interrupt.act)
    settings = {"max_steps": 4, "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2}
    trainer = make_trainer(
        tmp_path / "cut", make_loader(weighted), settings=settings, callbacks=[Interrupt()]
    )
    trainer.train()
    again = make_trainer(tmp_path / "cut", make_loader(weighted), settings=settings)
    again.train(tmp_path / "cut" / "checkpoint-2")
    whole = make_trainer(tmp_path / "whole", make_loader(weighted), settings=settings)
    whole.train()
    assert losses(again)[-2:] == losses(whole)[-2:]
    assert again.loader.step == 4


def test_resuming_a_finished_run_trains_nothing(tmp_path: Path, weighted: Path) -> None:
    train_once(str(weighted), str(tmp_path), max_steps=2)
    again = train_once(
        str(weighted), str(tmp_path), max_steps=2, resume=str(tmp_path / "checkpoint-2")
    )
    assert again["seen"] == []
    assert again["steps"] == again["loader_step"] == 2


@pytest.mark.parametrize("name", ["penstock_loader.json", "trainer_state.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_incomplete_checkpoint_is_refused(
    tmp_path: Path, weighted: Path, name: str, damage: str
) -> None:
    train_once(str(weighted), str(tmp_path), max_steps=2)
    file = tmp_path / "checkpoint-2" / name
    text = file.read_text()
    file.unlink()
    if damage == "cut":
        file.write_text(text[: len(text) // 2])
    with pytest.raises(StateError, match=r"checkpoint-2.*saving.*checkpoint"):
        train_once(str(weighted), str(tmp_path), resume=str(tmp_path / "checkpoint-2"))


def test_checkpoint_of_other_data_is_refused(tmp_path: Path, weighted: Path, small: Path) -> None:
    train_once(str(weighted), str(tmp_path), max_steps=2)
    with pytest.raises(StateError, match="holds other documents"):
        train_once(str(small), str(tmp_path), resume=str(tmp_path / "checkpoint-2"))


# -- loss
# --------------------------------------------------------------------------------------------------


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def bare_loop(loader: Loader, steps: int) -> list[float]:
    model = make_model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    found = []
    for step in loader:
        parts = [ps.huggingface.loss(model, row, step.loss_denominator) for row in step]
        sum(parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        found.append(sum(part.item() for part in parts))
        if len(found) == steps:
            break
    return found


@pytest.mark.parametrize("rows_per_microbatch", [1, 2, 4])
def test_losses_are_those_of_a_bare_loop(
    tmp_path: Path, weighted: Path, rows_per_microbatch: int
) -> None:
    trained = train_once(
        str(weighted),
        str(tmp_path),
        max_steps=3,
        rows_per_microbatch=rows_per_microbatch,
        lr_scheduler_type="constant",
    )
    np.testing.assert_allclose(trained["losses"], bare_loop(make_loader(weighted), 3), rtol=2e-6)
    assert len(trained["seen"]) == 3 * 4 // rows_per_microbatch


# -- the end of the data
# ---------------------------------------------------------------------------------------------


def test_finite_loader_trains_every_step_once(tmp_path: Path, small: Path) -> None:
    """Steps are counted, so that the schedule is right; the last, short step is trained too."""
    steps = [[row.tokens.tolist() for row in step] for step in make_loader(small, max_epochs=1)]
    assert len(steps[-1]) < 4
    found = train_once(str(small), str(tmp_path), max_steps=-1, max_epochs=1)
    assert found["steps"] == len(steps)
    blanks = [[0] * 32] * (4 - len(steps[-1]))
    assert [row for batch in found["seen"] for row in batch] == [
        row for step in steps for row in step
    ] + blanks
    # Resumed: as many steps in all, counted from the beginning.
    resumed = train_once(
        str(small), str(tmp_path), max_steps=-1, max_epochs=1, resume=str(tmp_path / "checkpoint-2")
    )
    assert resumed["losses"] == found["losses"]


def test_more_steps_than_data_ends_with_the_data(tmp_path: Path, small: Path) -> None:
    found = train_once(str(small), str(tmp_path), max_steps=50, max_epochs=1)
    assert found["steps"] == len(list(make_loader(small, max_epochs=1)))


def test_loader_at_its_end_is_refused_and_a_finished_run_is_not(
    tmp_path: Path, small: Path
) -> None:
    settings = {"max_steps": -1, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path, make_loader(small, max_epochs=1), settings=settings)
    trainer.train()
    with pytest.raises(ConfigError, match="the loader is at its end; make a new one"):
        trainer.train()
    steps = trainer.state.global_step
    again = make_trainer(tmp_path, make_loader(small, max_epochs=1), settings=settings)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == steps


def test_endless_loader_needs_max_steps(tmp_path: Path, weighted: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends.*TrainingArguments\(max_steps"):
        make_trainer(tmp_path, make_loader(weighted), settings={"max_steps": -1})


# -- evaluation
# --------------------------------------------------------------------------------------------------


def test_evaluation_is_the_loss_per_token_and_leaves_training_alone(
    tmp_path: Path, weighted: Path, small: Path
) -> None:
    plain = train_once(str(weighted), str(tmp_path / "a"), max_steps=4)
    found = train_once(
        str(weighted),
        str(tmp_path / "b"),
        max_steps=4,
        eval_data=str(small),
        eval_strategy="steps",
        eval_steps=1,
    )
    assert found["losses"] == plain["losses"]
    assert found["seen"] == plain["seen"]


def test_evaluation_is_exact_and_repeatable(tmp_path: Path, weighted: Path, small: Path) -> None:
    model = make_model()
    total = tokens = 0.0
    with torch.no_grad():
        for step in make_loader(small, max_epochs=1):
            total += sum(float(ps.huggingface.loss(model, row, 1.0)) for row in step)
            tokens += step.loss_denominator
    trainer = make_trainer(
        tmp_path, make_loader(weighted), model, eval_loader=make_loader(small, max_epochs=1)
    )
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_loss"] == second["eval_loss"] == pytest.approx(total / tokens, rel=1e-6)
    assert first["eval_tokens"] == tokens


def test_several_evaluations_by_name(tmp_path: Path, weighted: Path, small: Path) -> None:
    loaders = {
        name: make_loader(path, max_epochs=1)
        for name, path in {"data": weighted, "small": small}.items()
    }
    trainer = make_trainer(tmp_path, make_loader(weighted), eval_loader=loaders)
    metrics = trainer.evaluate()
    assert metrics["eval_data_tokens"] > metrics["eval_small_tokens"] > 0
    assert metrics["eval_data_loss"] > 0


def test_evaluation_must_end_and_be_a_loader_of_its_own(tmp_path: Path, weighted: Path) -> None:
    with pytest.raises(ConfigError, match="eval_loader never ends; set max_epochs=1"):
        make_trainer(tmp_path, make_loader(weighted), eval_loader=make_loader(weighted))
    loader = make_loader(weighted, max_epochs=1)
    with pytest.raises(ConfigError, match="eval_loader is also the training loader"):
        make_trainer(tmp_path, loader, eval_loader=loader)


# -- wrong set-ups
# --------------------------------------------------------------------------------------------------


def test_loader_of_another_world_is_refused(tmp_path: Path, weighted: Path) -> None:
    with pytest.raises(DistributedError, match=r"rank 1 of 2.*data-parallel rank 0 of 1"):
        make_trainer(tmp_path, make_loader(weighted, ranks=(1, 2)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"per_device_train_batch_size": 3},
            r"per_device_train_batch_size is 3, but 1 is used \(rows_per_microbatch\)",
        ),
        (
            {"gradient_accumulation_steps": 3},
            r"gradient_accumulation_steps is 3, but 4 is used \(4 rows a step",
        ),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 does not go with a loader"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True does not go with a loader"),
    ],
)
def test_contradicting_arguments_are_refused(
    tmp_path: Path, weighted: Path, settings: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, make_loader(weighted), settings=settings)


def test_fitting_arguments_pass_and_are_not_changed(tmp_path: Path, weighted: Path) -> None:
    given = arguments(tmp_path, gradient_accumulation_steps=2)
    trainer = ps.huggingface.Trainer(
        make_model(), given, loader=make_loader(weighted), rows_per_microbatch=2
    )
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (
        2,
        2,
    )
    assert (given.per_device_train_batch_size, given.ignore_data_skip) == (8, False)


def test_microbatches_must_divide_a_rank(tmp_path: Path, weighted: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows_per_microbatch=3.*rank's 4"):
        make_trainer(tmp_path, make_loader(weighted), rows_per_microbatch=3)


@pytest.mark.parametrize("name", ["train_dataset", "data_collator", "compute_loss_func"])
def test_what_the_loader_does_is_refused(tmp_path: Path, weighted: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} does not go with a loader"):
        make_trainer(tmp_path, make_loader(weighted), **{name: lambda *_: None})


def test_metrics_need_an_eval_dataset(tmp_path: Path, weighted: Path, small: Path) -> None:
    with pytest.raises(ConfigError, match=r"compute_metrics.*eval_loader"):
        make_trainer(
            tmp_path,
            make_loader(weighted),
            eval_loader=make_loader(small, max_epochs=1),
            compute_metrics=lambda _: {},
        )


def test_leaking_model_is_refused_unless_rows_hold_one_document(
    tmp_path: Path, weighted: Path
) -> None:
    leaking = {"kind": "bloom", "attention": "eager"}
    with pytest.raises(IsolationError, match=r"Bloom.*see each other.*packing='none'"):
        make_trainer(tmp_path, make_loader(weighted), make_model(**leaking))
    make_trainer(tmp_path, make_loader(weighted), make_model(**leaking), check_isolation=False)
    make_trainer(tmp_path, make_loader(weighted, packing="none"), make_model(**leaking)).train()


def test_router_losses_are_refused(tmp_path: Path, weighted: Path) -> None:
    model = make_model(
        "mixtral", num_local_experts=2, num_experts_per_tok=1, output_router_logits=True
    )
    with pytest.raises(ConfigError, match=r"output_router_logits.*set it to False"):
        make_trainer(tmp_path, make_loader(weighted), model)


def test_state_file_is_small_json(tmp_path: Path, weighted: Path) -> None:
    train_once(str(weighted), str(tmp_path), max_steps=2)
    text = (tmp_path / "checkpoint-2" / "penstock_loader.json").read_text()
    assert json.loads(text)["step"] == 2
    assert len(text) < 1024
