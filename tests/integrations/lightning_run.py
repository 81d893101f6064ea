"""One run with Lightning, in this process or (as a program) as one of several: what it saw and
computed.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from rank_runs import loss_of_documents, run_program
from tiny_models import make_loader, make_model

import penstock as ps
from penstock.integrations.lightning import LoaderDataModule

warnings.simplefilter("ignore")  # of Lightning, about itself
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(pl.LightningModule):
    """Records the tokens and the loss of each step; raises in step `fails`."""

    def __init__(self, fails: int | None = None, by_row: bool = False) -> None:
        super().__init__()
        self.model, self.fails = make_model(), fails
        self.automatic_optimization = not by_row
        self.seen: list[Any] = []
        self.losses: list[float] = []
        self.alone: list[float] = []

    def training_step(self, step: Any, _: int) -> Any:
        if step.index == self.fails:
            raise RuntimeError("as asked")
        self.seen.append([row.tokens.tolist() for row in step])
        self.alone.append(loss_of_documents(self.model, step))
        scaled = self.trainer.datamodule.scaled
        if not self.automatic_optimization:
            return self.row_by_row(step, scaled)
        loss = ps.huggingface.loss(self.model, step, step.loss_denominator)
        self.losses.append(float(loss.detach()))
        self.log("loss", scaled(loss), sync_dist=True)
        return scaled(loss)

    def row_by_row(self, step: Any, scaled: Any) -> None:
        total = 0.0
        for row in step:
            loss = ps.huggingface.loss(self.model, row, step.loss_denominator)
            self.manual_backward(scaled(loss))
            total += float(loss.detach())
        self.losses.append(total)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        # Not AdamW, which forgives a loss that is too large by a factor.
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Validated(Model):
    """Logs the weighted mean of the held-out loss."""

    validated: int = 0

    def validation_step(self, step: Any, _: int) -> None:
        self.validated += 1
        loss = ps.huggingface.loss(self.model, step, step.loss_denominator)
        scaled = self.trainer.datamodule.scaled(loss)
        self.log("held_out", scaled, sync_dist=True, batch_size=step.loss_denominator)


def fit(
    data: str,
    folder: str,
    *,
    resume: str | None = None,
    fails: int | None = None,
    save_every: int | None = None,
    by_row: bool = False,
    max_epochs: float | None = None,
    held_out: str | None = None,
    model: Model | None = None,
    ranks: int = 1,
    **settings: Any,
) -> tuple[Model, pl.Trainer]:
    """Train; the model and Lightning's trainer. `max_epochs` is the source's; Lightning's is
    `epochs`.
    """
    callbacks: list[Any] = [OnExceptionCheckpoint(folder)] if fails is not None else []
    if save_every:
        callbacks.append(
            ModelCheckpoint(folder, "{step}", every_n_train_steps=save_every, save_top_k=-1)
        )
    if "epochs" in settings:
        settings["max_epochs"] = settings.pop("epochs")
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "enable_checkpointing": bool(callbacks),
        "callbacks": callbacks,
        **settings,
    }
    if ranks > 1:
        given |= {"devices": ranks, "strategy": "ddp"}
    trainer = pl.Trainer(**given)
    model = model or (Model if held_out is None else Validated)(fails, by_row)
    module = LoaderDataModule(
        lambda place: make_loader(
            Path(data), ranks=(place.rank, place.size), max_epochs=max_epochs
        ),
        None
        if held_out is None
        else lambda place: make_loader(
            Path(held_out), ranks=(place.rank, place.size), max_epochs=1
        ),
    )
    trainer.fit(model, module, ckpt_path=resume)
    return model, trainer


def train(**settings: Any) -> dict[str, Any]:
    """As a program: what was seen."""
    model, trainer = fit(**settings)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"seen": model.seen, "losses": model.losses, "alone": model.alone, "metrics": metrics}


if __name__ == "__main__":
    run_program(train)
