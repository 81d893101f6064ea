"""Lightning: stopped in any way and resumed, it trains what an uninterrupted run does; its limits
and refusals.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
from rank_runs import losses_of, rows_of, run_on_ranks
from tiny_models import make_dataset, make_loader

from makers.processes import run_python

pytest.importorskip("lightning", reason="lightning is not installed: make test-integrations")

import lightning.pytorch as pl
import torch
from lightning_run import Model, Validated, fit

import penstock as ps
from penstock.core.errors import ConfigError, DistributedError, StateError
from penstock.integrations.lightning import LoaderDataModule


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Lightning warns about itself."""
    warnings.simplefilter("ignore")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(
        tmp_path_factory.mktemp("lightning") / "held_out", documents=40, seed=5, spans=True
    )


@pytest.mark.parametrize("max_epochs", [None, 1])
def test_stopped_and_resumed_anywhere_equals_uninterrupted(
    tmp_path: Path, weighted: Path, max_epochs: float | None
) -> None:
    """With a loader that never ends (Lightning fetches one batch ahead) and one that does."""
    whole, _ = fit(str(weighted), str(tmp_path), max_steps=6, save_every=1, max_epochs=max_epochs)
    assert len(whole.losses) == 6
    assert whole.losses == pytest.approx(whole.alone, rel=1e-5)
    for stop in (1, 2, 4):
        again, _ = fit(
            str(weighted),
            str(tmp_path),
            max_steps=6,
            resume=str(tmp_path / f"step={stop}.ckpt"),
            max_epochs=max_epochs,
        )
        assert (again.seen, again.losses) == (whole.seen[stop:], whole.losses[stop:])


@pytest.mark.parametrize("max_epochs", [None, 1])
@pytest.mark.parametrize("fails", [0, 3])
def test_a_checkpoint_of_an_exception_resumes_before_the_batch_that_failed(
    tmp_path: Path, weighted: Path, fails: int, max_epochs: float | None
) -> None:
    whole, _ = fit(str(weighted), str(tmp_path), max_steps=6, max_epochs=max_epochs)
    failed = Model(fails)
    with pytest.raises(RuntimeError, match="as asked"):
        fit(
            str(weighted),
            str(tmp_path),
            max_steps=6,
            fails=fails,
            model=failed,
            max_epochs=max_epochs,
        )
    again, _ = fit(
        str(weighted),
        str(tmp_path),
        max_steps=6,
        resume=str(tmp_path / "on_exception.ckpt"),
        max_epochs=max_epochs,
    )
    assert failed.seen + again.seen == whole.seen
    assert failed.losses + again.losses == whole.losses


def test_epochs_of_lightning_go_on_in_the_stream(tmp_path: Path, weighted: Path) -> None:
    """Also when it makes its data loaders again, and resumes in the middle of an epoch or between
    two.
    """
    data, folder = str(weighted), str(tmp_path)
    whole, _ = fit(data, folder, max_steps=9)
    epochs, _ = fit(data, folder, epochs=3, limit_train_batches=3, save_every=1)
    again, _ = fit(
        data, folder, epochs=3, limit_train_batches=3, reload_dataloaders_every_n_epochs=1
    )
    assert epochs.losses == again.losses == whole.losses
    for stop in (2, 3, 5, 6):
        resumed, _ = fit(
            data,
            folder,
            epochs=3,
            limit_train_batches=3,
            resume=str(tmp_path / f"step={stop}.ckpt"),
        )
        assert resumed.losses == whole.losses[stop:]


def test_one_epoch_of_lightning_is_all_that_the_sources_have(
    tmp_path: Path, held_out: Path
) -> None:
    steps = make_loader(held_out, max_epochs=1.5).count_steps()
    model, trainer = fit(str(held_out), str(tmp_path), epochs=1, max_epochs=1.5)
    assert len(model.seen) == trainer.global_step == steps
    half, _ = fit(str(held_out), str(tmp_path), epochs=2, max_epochs=1.5, limit_train_batches=0.5)
    assert half.seen == model.seen[: 2 * (steps // 2)]


class TwoOptimizers(Model):
    """Some weights each, as Muon and AdamW have them; steps with both `each` batches."""

    def __init__(self, each: int = 1) -> None:
        super().__init__(by_row=True)
        self.each = each

    def row_by_row(self, step: Any, scaled: Any) -> None:
        self.manual_backward(scaled(ps.huggingface.loss(self.model, step, step.loss_denominator)))
        for optimizer in self.optimizers() if step.index % self.each == 0 else ():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        weights = list(self.parameters())
        return [torch.optim.SGD(weights[:4], lr=0.1), torch.optim.SGD(weights[4:], lr=0.1)]


def test_steps_of_two_optimizers_are_counted_as_lightning_does(
    tmp_path: Path, held_out: Path
) -> None:
    steps = make_loader(held_out, max_epochs=1).count_steps()
    model, _ = fit(
        str(held_out), str(tmp_path), model=TwoOptimizers(), max_steps=2 * steps, max_epochs=1
    )
    assert len(model.seen) == steps
    with pytest.raises(ConfigError, match=rf"max_steps={2 * steps + 1}.*after {steps}"):
        fit(
            str(held_out),
            str(tmp_path),
            model=TwoOptimizers(),
            max_steps=2 * steps + 1,
            max_epochs=1,
        )
    with pytest.raises(ConfigError, match=rf"batch.*after.*{steps}.*sources"):
        fit(str(held_out), str(tmp_path), model=TwoOptimizers(2), max_steps=2 * steps, max_epochs=1)


def test_a_new_trainer_begins_where_the_loader_was_given(tmp_path: Path, weighted: Path) -> None:
    loader = make_loader(weighted, max_epochs=1).seek(2)
    module, seen = LoaderDataModule(loader), []
    for _ in range(2):
        model = Model()
        settings: dict[str, Any] = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        pl.Trainer(fast_dev_run=2, logger=False, default_root_dir=tmp_path, **settings).fit(
            model, module
        )
        seen.append(model.seen)
        assert (
            len(module.train_dataloader()) == make_loader(weighted, max_epochs=1).count_steps() - 2
        )
    steps = make_loader(weighted).seek(2)
    assert (
        seen[0]
        == seen[1]
        == [[row.tokens.tolist() for row in step] for step, _ in zip(steps, range(2), strict=False)]
    )


def test_validations_are_whole_passes_and_change_nothing(
    tmp_path: Path, weighted: Path, held_out: Path
) -> None:
    data, folder = str(weighted), str(tmp_path)
    whole, _ = fit(data, folder, max_steps=6)
    settings: dict[str, Any] = {
        "held_out": str(held_out),
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
    }
    model, trainer = fit(data, folder, max_steps=6, num_sanity_val_steps=1, **settings)
    assert model.losses == whole.losses
    passes = make_loader(held_out, max_epochs=1)
    assert model.validated == 1 + 3 * passes.count_steps()
    wanted, weights = 0.0, 0.0
    for step in passes:
        wanted += step.loss_denominator * float(
            ps.huggingface.loss(model.model, step, step.loss_denominator).detach()
        )
        weights += step.loss_denominator
    assert float(trainer.callback_metrics["held_out"]) == pytest.approx(wanted / weights, rel=1e-5)


def test_validations_are_whole_passes_when_lightning_makes_its_loaders_again(
    tmp_path: Path, weighted: Path, held_out: Path
) -> None:
    settings: dict[str, Any] = {
        "epochs": 3,
        "limit_train_batches": 2,
        "reload_dataloaders_every_n_epochs": 1,
    }
    model, _ = fit(
        str(weighted), str(tmp_path), num_sanity_val_steps=1, held_out=str(held_out), **settings
    )
    assert model.validated == 1 + 3 * make_loader(held_out, max_epochs=1).count_steps()
    assert len(model.seen) == 6


def test_several_loaders_for_validation(tmp_path: Path, weighted: Path, held_out: Path) -> None:
    class Two(Validated):
        def validation_step(self, step: Any, _: int, dataloader_idx: int = 0) -> None:
            self.log(f"steps_{dataloader_idx}", 1.0, reduce_fx="sum", batch_size=1)

    loaders = [make_loader(path, max_epochs=1) for path in (held_out, weighted)]
    module, model = LoaderDataModule(make_loader(weighted), loaders), Two()
    settings: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = pl.Trainer(
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        default_root_dir=tmp_path,
        **settings,
    )
    trainer.fit(model, module)
    found = [
        float(trainer.callback_metrics[f"steps_{place}/dataloader_idx_{place}"])
        for place in range(2)
    ]
    assert found == [loader.count_steps() for loader in loaders]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"epochs": 2, "max_epochs": 1},
            r"max_epochs=2 of 36 batches, but the sources end after 36 steps\. Passes",
        ),
        ({"max_epochs": 1}, r"max_epochs=1000 of 36 batches, but the sources end"),
        ({"max_epochs": 1, "max_steps": 40}, r"max_steps=40, but the sources end after 36 steps"),
        (
            {"max_steps": 4, "accumulate_grad_batches": 2},
            r"accumulate_grad_batches is 2, but a batch is already all",
        ),
        (
            {"max_steps": 4, "overfit_batches": 2},
            r"overfit_batches is 2, but each of its epochs goes on",
        ),
    ],
)
def test_settings_that_cannot_be_right_are_refused(
    tmp_path: Path, weighted: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(str(weighted), str(tmp_path), **settings)


def test_accumulation_that_begins_later_is_refused(tmp_path: Path, weighted: Path) -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    schedule = GradientAccumulationScheduler({1: 2})
    with pytest.raises(ConfigError, match="accumulate_grad_batches is 2"):
        fit(
            str(weighted),
            str(tmp_path),
            epochs=2,
            limit_train_batches=2,
            callbacks=[schedule],
            enable_checkpointing=False,
        )


def test_other_loaders_than_these_are_refused(tmp_path: Path, weighted: Path) -> None:
    settings: dict[str, Any] = {
        "enable_progress_bar": False,
        "logger": False,
        "accelerator": "cpu",
        "max_steps": 2,
    }
    trainer = pl.Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **settings)
    with pytest.raises(ConfigError, match=r"function.*ranks.*got 3"):
        LoaderDataModule(3)  # type: ignore[arg-type]
    with pytest.raises(DistributedError, match=r"rank 1.*2.*1.*function"):
        trainer.fit(Model(), LoaderDataModule(make_loader(weighted, ranks=(1, 2))))
    with pytest.raises(ConfigError, match=r"penstock\.Loader"):
        trainer.fit(Model(), LoaderDataModule(lambda ranks: None))  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="a loader of val never ends"):
        trainer.fit(Model(), LoaderDataModule(make_loader(weighted), make_loader(weighted)))
    same = make_loader(weighted, max_epochs=1)
    with pytest.raises(ConfigError, match="the loader of val is also that of train"):
        trainer.fit(Model(), LoaderDataModule(same, same))
    with pytest.raises(StateError, match="it has no Trainer yet"):
        LoaderDataModule(same).state_dict()
    with pytest.raises(StateError, match=r"loader.*Lightning"):
        LoaderDataModule(same).loader  # noqa: B018


def test_a_checkpoint_of_something_else_is_refused(
    tmp_path: Path, weighted: Path, counting: Path
) -> None:
    """A bare loader's (which refuses to be saved), one without a state, and one of other data."""
    settings: dict[str, Any] = {
        "enable_progress_bar": False,
        "logger": False,
        "accelerator": "cpu",
        "max_steps": 2,
    }
    trainer = pl.Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **settings)

    class Saving(Model):
        def training_step(self, step: Any, _: int) -> Any:
            self.trainer.save_checkpoint(tmp_path / "bare.ckpt")

    with pytest.raises(StateError, match=r"whoever.*iterates"):
        trainer.fit(Saving(), make_loader(weighted))

    fit(str(weighted), str(tmp_path), max_steps=3, save_every=1)
    saved = torch.load(tmp_path / "step=2.ckpt", weights_only=False)
    del saved["LoaderDataModule"]
    torch.save(saved, tmp_path / "without.ckpt")
    with pytest.raises(StateError, match=r"trained 2.*loader's"):
        fit(str(weighted), str(tmp_path), max_steps=3, resume=str(tmp_path / "without.ckpt"))
    saved["LoaderDataModule"] = {"trained": 2}
    torch.save(saved, tmp_path / "without.ckpt")
    with pytest.raises(StateError, match="LoaderDataModule"):
        fit(str(weighted), str(tmp_path), max_steps=3, resume=str(tmp_path / "without.ckpt"))
    with pytest.raises(StateError, match="holds other documents"):
        fit(str(counting), str(tmp_path), max_steps=3, resume=str(tmp_path / "step=2.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize("by_row", [False, True])
def test_two_ranks_stop_and_resume_in_new_processes(
    tmp_path: Path, weighted: Path, held_out: Path, by_row: bool
) -> None:
    """DDP: the rows and losses of one rank, uninterrupted; the mean that Lightning logs is the
    step's loss.
    """
    one, _ = fit(str(weighted), str(tmp_path), max_steps=5, by_row=by_row)
    settings: dict[str, Any] = {
        "data": str(weighted),
        "folder": str(tmp_path),
        "by_row": by_row,
        "ranks": 2,
    }
    if not by_row:
        settings |= {
            "held_out": str(held_out),
            "val_check_interval": 1,
            "check_val_every_n_epoch": None,
        }
    first = run_on_ranks(
        "lightning_run.py", tmp_path / "first", 2, max_steps=2, save_every=1, **settings
    )
    saved = str(tmp_path / "step=2.ckpt")
    second = run_on_ranks(
        "lightning_run.py", tmp_path / "second", 2, max_steps=5, resume=saved, **settings
    )
    assert rows_of(first, 2) + rows_of(second, 3) == one.seen
    assert losses_of(first) + losses_of(second) == pytest.approx(one.losses, rel=1e-4)
    assert losses_of(first) + losses_of(second) == pytest.approx(
        [
            sum(parts)
            for found in (first, second)
            for parts in zip(*(rank["alone"] for rank in found), strict=True)
        ],
        rel=1e-4,
    )
    # Two ranks' checkpoint, resumed on one.
    alone, trainer = fit(
        str(weighted),
        str(tmp_path),
        max_steps=5,
        resume=saved,
        by_row=by_row,
        held_out=settings.get("held_out"),
    )
    assert alone.losses == pytest.approx(one.losses[2:], rel=1e-4)
    if not by_row:
        assert second[0]["metrics"]["loss"] == pytest.approx(one.losses[-1], rel=1e-4)
        trainer.validate(alone, trainer.datamodule, verbose=False)
        held = float(trainer.callback_metrics["held_out"])
        assert (
            second[0]["metrics"]["held_out"]
            == second[1]["metrics"]["held_out"]
            == pytest.approx(held, rel=1e-4)
        )


def test_fabric_saves_a_loader_state(tmp_path: Path, counting: Path) -> None:
    from lightning.fabric import Fabric

    from penstock.integrations import LoaderState

    fabric, place = Fabric(accelerator="cpu", devices=1), LoaderState(make_loader(counting))
    for step in place:
        place.trained(step)
        if step.index == 1:
            break
    fabric.save(tmp_path / "saved.ckpt", {"loader": place})
    again = LoaderState(make_loader(counting))
    fabric.load(tmp_path / "saved.ckpt", {"loader": again})
    assert next(iter(again)).index == 2


@pytest.mark.slow
def test_the_example_starts_its_own_processes(tmp_path: Path, weighted: Path) -> None:
    """Two, then one that goes on: the last loss of one alone."""
    example = Path(__file__).parents[2] / "examples" / "lightning_loop.py"

    def last(folder: str, steps: int, processes: int) -> str:
        words = [weighted, tmp_path / folder, "--steps", steps, "--processes", processes]
        found = run_python("-W", "ignore", example, *words, cwd=tmp_path)
        assert found.returncode == 0, found.stderr[-4000:]
        return next(
            line for line in found.stdout.splitlines() if line.startswith(f"step {steps}: loss")
        )

    last("cut", 10, 2)
    assert last("cut", 12, 1)[:-1] == last("whole", 12, 1)[:-1]
