"""TRL's DPOTrainer on pairs of token ids: what was prepared is trained, with TRL's losses and
everything else of it.

TRL tokenizes texts by itself, and has no way in for ids. Here a dataset with the columns of
`preference_pairs` passes as it is; any other goes TRL's way. With log-probabilities of a reference
in the columns, none are computed.
"""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import ConfigError, MissingExtraError

try:
    import trl
except ModuleNotFoundError as error:
    raise MissingExtraError("trl") from error

from penstock.integrations.trl.preferences import PAIR_COLUMNS, digest, longest
from penstock.plan.loader.agreement import check_values

_REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")


class DPOTrainer(trl.DPOTrainer):  # type: ignore[misc]
    """A `trl.DPOTrainer` that also takes `penstock.trl.preference_pairs` as `train_dataset` and
    `eval_dataset`.

    ```python
    pairs = ps.trl.preference_pairs("data/pairs")
    trainer = ps.trl.DPOTrainer(model, args=DPOConfig("run"), train_dataset=pairs, processing_class=tokenizer)
    ```

    Takes all arguments of `trl.DPOTrainer`. With `DPOConfig(precompute_ref_log_probs=True)` the
    reference's log-probabilities are those of the columns, where these are there.

    Raises:
        ConfigError: A pair is longer than `max_length`, so TRL would cut it; or a rank has other
            pairs.
    """  # noqa: E501

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        if not _has(dataset, PAIR_COLUMNS):
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if args.max_length is not None and (found := longest(dataset)) > args.max_length:
            raise ConfigError(
                f"DPOTrainer: the longest pair of the {dataset_name} dataset has {found:,} "
                f"tokens, and max_length={args.max_length:,} would cut it; set "
                "DPOConfig(max_length=None), or leave long documents out when preparing"
            )
        # Each rank takes the pairs of some indices, so all must have the same list.
        check_values({f"the {dataset_name} dataset": f"{len(dataset):,} pairs ({digest(dataset)})"})
        return dataset

    def _precompute_ref_logps(self, dataset: object, name: str, batch_size: int) -> Any:
        if _has(dataset, _REFERENCE_COLUMNS):
            return dataset
        return super()._precompute_ref_logps(dataset, name, batch_size)


def _has(dataset: object, columns: tuple[str, ...]) -> bool:
    names = getattr(dataset, "column_names", None)
    return not isinstance(names, Mapping) and set(columns) <= set(names or ())
