"""Opens whatever dataset is at a path."""

from pathlib import Path

from penstock.errors import ConfigError, FormatError
from penstock.locations import local_path
from penstock.shards.dataset import Dataset
from penstock.shards.in_place import InPlaceCorpus
from penstock.shards.megatron import megatron_prefix, open_megatron
from penstock.shards.npy import open_npy


def open_dataset(path: str | Path, *, dtype: str | None = None, eos_id: int | None = None) -> Dataset | InPlaceCorpus:
    """Open a dataset in place.

    Args:
        path: A folder that `penstock prepare` made; a Megatron corpus (its prefix, `.bin` or `.idx`); or an `.npy` file
            of bare tokens.
        dtype: Type of the tokens of an `.npy` file: "uint16" or "uint32".
        eos_id: The token that ends each document: of an `.npy` file, and of a Megatron corpus where all have it.

    Raises:
        FormatError: Nothing that penstock can read is there.
        CorruptionError: What is there is damaged.
        ConfigError: An `.npy` file without `dtype` and `eos_id`, or a URL.
    """
    path = local_path(path, "a dataset")
    if path.suffix == ".npy":
        if dtype is None or eos_id is None:
            raise ConfigError(
                f"{path}: a file of bare tokens does not say their type nor where documents end; "
                "give dtype ('uint16' or 'uint32') and eos_id (--dtype, --eos-id)"
            )
        return open_npy(path, dtype, eos_id)
    if not path.is_dir():
        prefix = megatron_prefix(path)
        if prefix.with_name(prefix.name + ".idx").is_file():
            return open_megatron(prefix, eos_id)
        found = "not a dataset" if path.exists() else "nothing there"
        raise FormatError(
            f"{path}: {found}; give a folder that `penstock prepare` made, a Megatron prefix, or an .npy file"
        )
    return Dataset.open(path)
