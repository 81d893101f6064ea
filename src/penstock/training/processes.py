"""What several processes do together while one of them writes: fail together, or go on together."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import DistributedError


def is_first() -> bool:
    """Whether this is the process that writes: the only one, or rank 0."""
    import torch.distributed as dist

    return not _several() or dist.get_rank() == 0


@contextmanager
def in_step() -> Iterator[None]:
    """All processes run the body, and leave it together: an error in one is an error in each.

    Raises:
        DistributedError: The body failed in another process; that one raises its own error.
    """
    import torch.distributed as dist

    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if _several():
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, None if error is None else str(error))
        failed = next((rank for rank, message in enumerate(found) if message is not None), None)
        if error is None and failed is not None:
            raise DistributedError(f"rank {failed} failed: {found[failed]}")
    if error is not None:
        raise error


def _several() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
