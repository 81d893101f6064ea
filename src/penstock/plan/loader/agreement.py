"""Whether processes that train together read the same data: each makes its own plan, so all must be
made alike.

Another seed, a copy of the data with other documents, or other shares on one rank give every rank a
plan of its own: some documents are then trained twice, others never, and no step says so. So what
the plans are made from is compared once, at the start: some 100 bytes a rank. Values that are not
of the plan (a learning rate) can be compared with them.

Ranks that all take part compare by a collective (`torch_gather`). Where only some have a loader
(Megatron), or nothing says which processes train together (a user's loop), those with loaders
compare by the store of torch.distributed (`store_gather`), which needs no process group of them.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError, DistributedError
from penstock.plan.loader.data_parallel import DataParallel

if TYPE_CHECKING:
    from penstock.plan.loader.loader import Loader

Gather = Callable[[Any], Sequence[Any] | Mapping[str, Any]]
"""Called on all ranks with a value of this one, which JSON can hold; gives those of all, in order,
or by name.
"""

MOST_NAMED = 5
"""Differences that an error names; the others are counted."""
_rounds: Counter[tuple[str, int]] = Counter()
"""Comparisons by a store that this process has begun."""


def check_ranks(
    loader: "Loader", gather: Gather | None = None, more: Mapping[str, object] | None = None
) -> None:
    """Compare the plans of all ranks; all of them must call it.

    Args:
        loader: This rank's.
        gather: How to talk to the others; None: the default process group of torch.distributed, if
            it has begun.
        more: Other values that must be the same on all ranks, by name; see `leaves`.

    Raises:
        ConfigError: A rank has another plan, or another of the values; the same error on all ranks.
    """
    _compare(loader, gather or torch_gather(), dict(leaves(more or {})))


def check_values(values: Mapping[str, str], gather: Gather | None = None) -> None:
    """Compare texts that must be the same on all ranks, by name; like `check_ranks` without a
    loader.
    """
    _compare(None, gather or torch_gather(), values)


def _compare(loader: "Loader | None", gather: Gather | None, values: Mapping[str, str]) -> None:
    if gather is None:
        return
    plan = None if loader is None else loader.made_from
    found = gather({"plan": plan, "more": dict(values)})
    named = (
        found
        if isinstance(found, Mapping)
        else {f"rank {rank}": other for rank, other in enumerate(found)}
    )
    first = named["rank 0"]
    for where, other in named.items():
        changed = [] if loader is None else loader.differences(first["plan"], other["plan"], where)
        changed += changes(first["more"], other["more"], where)
        if changed:
            raise ConfigError(
                f"{where} does not train what rank 0 trains: {'; '.join(changed)}. Give all "
                "ranks the same data and settings: each plans alone, so otherwise documents "
                "would be trained twice or never"
            )


def changes(first: Mapping[str, str], other: Mapping[str, str], where: str) -> list[str]:
    """In what the leaves of rank 0 and those of another process differ, in words; the first few,
    and how many more.
    """
    names: list[str] = []
    for name in dict.fromkeys((*first, *other)):
        # Where a section is there on one rank only, its settings say nothing more.
        if first.get(name) != other.get(name) and not any(
            name.startswith(f"{above}.") for above in names
        ):
            names.append(name)
    told = [
        f"{name} is {first.get(name, 'not there')} on rank 0, {other.get(name, 'not there')} "
        f"on {where}"
        for name in names[:MOST_NAMED]
    ]
    return told + ([f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else [])


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The single values in nested settings (dataclasses, mappings, sequences) as text, by dotted
    name.
    """
    if is_dataclass(value) and not isinstance(value, type):
        inner: Any = ((field.name, getattr(value, field.name)) for field in fields(value))
        yield name, type(value).__name__
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple) and value:
        inner = enumerate(value)
    else:
        text = repr(value)
        # An object without words of its own says where it lies in memory, which differs in each
        # process.
        yield (
            name,
            text
            if " at 0x" not in text
            else getattr(value, "__qualname__", type(value).__qualname__),
        )
        return
    for key, one in inner:
        yield from leaves(one, f"{name}.{key}" if name else str(key))


def torch_gather() -> Gather | None:
    """How ranks talk by torch.distributed; None where this process is alone, or the group has not
    begun.
    """
    distributed = _distributed()
    if distributed is None:
        return None
    size = distributed.get_world_size()

    def gather(value: object) -> list[Any]:
        found = [None] * size
        distributed.all_gather_object(found, value)
        return found

    return gather


def store_gather(place: DataParallel, who: str) -> Gather | None:
    """How the processes that have loaders talk by the store of torch.distributed; None as in
    `torch_gather`.

    Processes without a loader take no part. Gives the values of the data-parallel ranks, and this
    process's own: of processes with the same rank (pipeline stages), the first to come speaks for
    it.

    Args:
        place: Of this process's loader.
        who: Who compares; comparisons of different names do not meet.

    Raises:
        DistributedError: There are fewer processes than ranks; or, while gathering, no process has
            a rank's loader.
    """
    distributed = _distributed()
    if distributed is None:
        return None
    if place.size > distributed.get_world_size():
        raise DistributedError(
            f"{who}: the loader has the rows of rank {place.rank} of {place.size}, but there "
            f"are only {distributed.get_world_size()} processes, so some rows would not be "
            "trained; make it with the data-parallel rank and size of this process"
        )
    _rounds[who, place.size] += 1
    prefix = f"penstock/{who}/{place.size}/{_rounds[who, place.size]}"
    store = distributed.distributed_c10d._get_default_store()

    def gather(value: object) -> dict[str, Any]:
        store.compare_set(f"{prefix}/{place.rank}", "", json.dumps(value))
        keys = [f"{prefix}/{rank}" for rank in range(place.size)]
        try:
            store.wait(keys)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise DistributedError(
                f"{who}: no process has made a loader of rank "
                f"{', '.join(map(str, missing[:8]))} of {place.size}, and each of these ranks "
                "has a part of every step"
            ) from error
        named = {f"rank {rank}": json.loads(store.get(key)) for rank, key in enumerate(keys)}
        return {**named, "this process": json.loads(json.dumps(value))}

    return gather


def _distributed() -> Any:
    """torch.distributed, if it is in use in several processes."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed if distributed.get_world_size() > 1 else None
