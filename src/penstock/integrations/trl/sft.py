"""TRL's SFTTrainer fed by a loader: rows go to TRL's own collator and loss; state and checkpoints
are penstock's.

What keeps documents apart in TRL is set here: `padding_free`, no packing, no `max_length`, no
preparation of the dataset, and `seq_lengths` of each row, from which TRL's collator makes positions
and borders. TRL sums log-probabilities over the tokens of all microbatches and ranks and divides
once, which with weights of 0 and 1 is the loss of the whole step.

TRL's collator drops the label of the first token of each document. That is no target, unless a
document was cut: so cuts are refused, and so is everything else that labels do not express
(`penstock.integrations.plain_targets`).
"""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError, MissingExtraError

try:
    import trl
except ModuleNotFoundError as error:
    raise MissingExtraError("trl") from error

from datasets import Dataset

from penstock.integrations.huggingface.losses import refuse_unknown_ids
from penstock.integrations.huggingface.trainer import LoaderTraining
from penstock.integrations.plain_targets import PlainTargets, empty_row, require_fields
from penstock.plan.inputs import IGNORE
from penstock.plan.inputs.model_input import ModelInput
from penstock.plan.loader.loader import Loader

_TARGETS = PlainTargets("trl.SFTTrainer", cuts=False)
_MASKS = ("assistant_only_loss", "completion_only_loss")


class SFTTrainer(LoaderTraining, trl.SFTTrainer):  # type: ignore[misc]
    """A `trl.SFTTrainer` with `loader=` instead of `train_dataset=`; see also
    `penstock.huggingface.Trainer`.

    ```python
    loader = ps.Loader(ps.Source("data/chats", too_long="drop"), sequence_length=4096, rows_per_step=64)
    trainer = ps.trl.SFTTrainer(model, SFTConfig("run", max_steps=1000), loader=loader, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=True)
    ```

    A checkpoint holds the loader's state after its own step. Batch size, gradient accumulation,
    lengths and padding follow from the loader. A model with experts gets TRL's balance loss, which
    is a mean over microbatches.

    Args:
        model: A causal language model, or what TRL loads one from.
        args: A `trl.SFTConfig`; is copied, not changed.
        loader: The training data, made for this rank.
        eval_loader: The data for `evaluate`: a loader that ends, or several by name.
        rows_per_microbatch: Rows of one forward pass, without their padding.
        check_isolation: Refuse a model that lets documents of one row see each other.
        **kwargs: As for `trl.SFTTrainer`: `processing_class`, `peft_config`, `callbacks`, …

    Raises:
        ConfigError: Settings contradict each other, or TRL's labels do not express the data; the
            message says which.
        DistributedError: The loader's rank or number of ranks is not that of this process.
        IsolationError: The model lets documents of one row see each other.
    """  # noqa: E501

    def __init__(
        self,
        model: object = None,
        args: object = None,
        *,
        loader: Loader | None = None,
        eval_loader: Loader | dict[str, Loader] | None = None,
        rows_per_microbatch: int = 1,
        check_isolation: bool = True,
        **kwargs: object,
    ) -> None:
        args = trl.SFTConfig("trl-sft") if args is None else copy.copy(args)
        if not isinstance(args, trl.SFTConfig):
            raise ConfigError(f"SFTTrainer: args must be trl.SFTConfig, got {args!r}")
        _refuse_masks(args)
        known = None if isinstance(model, str) else model
        self._take(known, args, kwargs, (loader, eval_loader), rows_per_microbatch, trl.SFTTrainer)
        _TARGETS.check(self.loader)
        require_fields("SFTTrainer", {"loader": self.loader}, "cu_seqlens")
        args.padding_free, args.max_length, args.dataset_kwargs = (
            True,
            None,
            {"skip_prepare_dataset": True},
        )
        placeholder = Dataset.from_list([_example(None)])
        evaluation = kwargs.pop("eval_dataset")
        # Loaders are no datasets: TRL would look for their columns.
        given = evaluation if eval_loader is None else placeholder
        super().__init__(model, args, train_dataset=placeholder, eval_dataset=given, **kwargs)
        self.eval_dataset = evaluation
        self._check_model(eval_loader, check_isolation)

    def get_train_dataloader(self) -> Any:
        """Microbatches of the loader from its current place, made by TRL's collator; nothing is
        left to shard.
        """
        return _Batches(self)

    def microbatches(self) -> Iterator[dict[str, Any]]:
        """TRL's batches of the loader's steps, from its current place on."""
        size = self.args.per_device_train_batch_size
        for step in self._steps():
            rows = list(step)
            rows += [empty_row(rows[0])] * (
                size * self.args.gradient_accumulation_steps - len(rows)
            )
            for begin in range(0, len(rows), size):
                some = rows[begin : begin + size]
                refuse_unknown_ids(some, self._known_ids)
                yield self.data_collator([_example(row) for row in some])


class _Batches:
    """`SFTTrainer.microbatches` as something that can be iterated again."""

    def __init__(self, trainer: SFTTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._trainer.microbatches()


def _example(row: ModelInput | None) -> dict[str, Any]:
    """What TRL's collator reads of a row: its tokens without padding, labels (not shifted), lengths
    of documents.

    A row without tokens, or None, becomes one token without a target.

    Raises:
        ConfigError: TRL's labels do not express the row, or would drop a target of it.
    """
    if row is None or not row.num_tokens:
        return {"input_ids": [0], "labels": [IGNORE], "seq_lengths": [1]}
    targets, _ = _TARGETS.of(row)
    size, borders = row.num_tokens, row.cu_seqlens
    assert borders is not None
    ends = np.unique(np.minimum(borders[1:], size))
    if (targets[ends - 1] != IGNORE).any():
        raise ConfigError(
            "trl.SFTTrainer: a document of the row was cut, and TRL would drop the target at "
            "the cut; set Source(too_long='drop'), 'truncate' or 'keep_end', and no packing "
            "that cuts"
        )
    labels = np.full(size, IGNORE, np.int64)
    labels[1:] = targets[: size - 1]
    return {
        "input_ids": row.tokens[:size].astype(np.int64),
        "labels": labels,
        "seq_lengths": np.diff(ends, prepend=0).tolist(),
    }


def _refuse_masks(args: Any) -> None:
    for name in _MASKS:
        if getattr(args, name, None):
            raise ConfigError(
                f"SFTTrainer: {name}=True does not go with a loader: what is trained was "
                "decided when the data were prepared (penstock.prepare, chat settings); "
                "leave it out"
            )
    if not args.average_tokens_across_devices:
        raise ConfigError(
            "SFTTrainer: average_tokens_across_devices=False would divide each rank's loss by "
            "its own tokens, so that the loss depended on the ranks; leave it out"
        )
