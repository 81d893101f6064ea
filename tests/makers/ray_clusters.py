"""Small clusters of Ray on this machine."""

from contextlib import suppress
from typing import Any

STORE = 80 << 20
"""Bytes of shared memory of a node."""
ATTEMPTS = 10


def begin_cluster(nodes: int = 2) -> tuple[Any, list[Any]]:
    """A cluster of nodes with one core each, and its nodes, the head first; this process is
    connected to it.

    Ray gives a node 30 seconds to start, which a busy machine may not have, so that is tried again.
    """
    import ray
    from ray.cluster_utils import Cluster

    for attempt in range(ATTEMPTS):
        cluster = Cluster()
        try:
            more = {"num_cpus": 1, "object_store_memory": STORE}
            started = [
                cluster.add_node(**more, **({} if n else {"include_dashboard": False}))
                for n in range(nodes)
            ]
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            if attempt == ATTEMPTS - 1 or not any(
                word in str(error) for word in ("timed out", "node", "GCS")
            ):
                raise
            with suppress(Exception):
                ray.shutdown()
            with suppress(Exception):
                cluster.shutdown()
        else:
            return cluster, started
    raise AssertionError
