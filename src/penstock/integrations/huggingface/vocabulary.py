"""Token ids that a model has no embedding for, found before torch fails at them (on a GPU, without saying where)."""

from collections.abc import Sequence
from typing import Any

from penstock.errors import ConfigError
from penstock.inputs import ModelInput


def known_ids(model: Any) -> int | None:
    """How many ids the model's input embedding has; None when the model does not say.

    Its `num_embeddings`, because the weight itself may be sharded away from this process.
    """
    try:
        embedding = model.get_input_embeddings()
        return int(getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0])
    except (AttributeError, NotImplementedError):
        return None


def refuse_unknown_ids(rows: Sequence[ModelInput], known: int | None) -> None:
    """Refuse rows with an id that is not below `known`; costs one look at each token, on the CPU.

    Raises:
        ConfigError: There is one; says where in the row.
    """
    if known is None:
        return
    for row in rows:
        slot = int(row.tokens.argmax())
        if row.tokens[slot] >= known:
            what = "padding (the loader's pad_id)" if slot >= row.num_tokens else f"slot {slot} of a row"
            raise ConfigError(
                f"token id {int(row.tokens[slot])} in {what}, but the model has embeddings for {known} ids; the data "
                "were made with another tokenizer: prepare them with the model's, or call "
                "model.resize_token_embeddings(…)"
            )
