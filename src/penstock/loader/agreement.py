"""Whether processes that train together read the same data: each makes its own plan, so all must be made alike.

Another seed, a copy of the data with other documents, or other shares on one rank give every rank a plan of its own:
some documents are then trained twice, others never, and no step says so. So what the plans are made from is compared
once, at the start: some 100 bytes a rank. Values that are not of the plan (a learning rate) can be compared with them.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.loader.loader import Loader

Gather = Callable[[Any], Sequence[Any]]
"""Called on all ranks with a value of this one; gives those of all, in order."""


def check_ranks(loader: "Loader", gather: Gather | None = None, more: Mapping[str, Any] | None = None) -> None:
    """Compare the plans of all ranks; all of them must call it.

    Args:
        loader: This rank's.
        gather: How to talk to the others; None: the default process group of torch.distributed, if it has begun.
        more: Other values that must be the same on all ranks, by name.

    Raises:
        ConfigError: A rank has another plan, or another of the values; the same error on all ranks.
    """
    gather = gather or torch_gather()
    if gather is None:
        return
    found = gather({"plan": loader.made_from, "more": {name: repr(value) for name, value in (more or {}).items()}})
    for rank, other in enumerate(found):
        changed = loader.differences(found[0]["plan"], other["plan"], rank)
        changed += [
            f"{name} is {one} on rank 0, {other['more'].get(name)} on rank {rank}"
            for name, one in found[0]["more"].items()
            if other["more"].get(name) != one
        ]
        if changed:
            raise ConfigError(
                f"rank {rank} does not train what rank 0 trains: {'; '.join(changed)}. Give all ranks the same data "
                "and settings: each plans alone, so otherwise documents would be trained twice or never"
            )


def torch_gather() -> Gather | None:
    """How ranks talk by torch.distributed; None where this process is alone, or the group has not begun."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    size = distributed.get_world_size()
    if size == 1:
        return None

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        distributed.all_gather_object(found, value)
        return found

    return gather
