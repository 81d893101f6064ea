"""Run by test_prepare_ray_nodes.py: prepares on a cluster of two nodes of this machine, and disturbs it.

Arguments: the source, the tokenizer, the output, and what happens: `nothing`, `worker` (one is killed) or `node` (one
is lost). Prints one JSON line: the report's numbers and the nodes that worked.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import ray

import penstock as ps
from makers.ray_clusters import begin_cluster
from patience import PATIENCE_SECONDS

_both = []


def prepared(record):
    """A transform that takes its time, and notes which process of which node works; first it waits for both nodes."""
    note = f"{os.getpid()} {ray.get_runtime_context().get_node_id()}\n"
    with open(os.environ["WORKERS"], "a") as file:
        file.write(note)
    time.sleep(0.001)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not _both and len(nodes()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    _both.append(True)
    return record


def workers():
    path = Path(os.environ["WORKERS"])
    # A line may be half written.
    return [line.split() for line in path.read_text().splitlines() if " " in line] if path.exists() else []


def nodes():
    return {node for _, node in workers()}


def main():
    source, tokenizer, output, event = sys.argv[1:]
    cluster, (_, second) = begin_cluster()

    def disturb():
        while len(nodes()) < 2 or len(list(Path(output).glob(".prepare/part-*.json"))) < 2:
            time.sleep(0.05)
        if event == "worker":
            os.kill(int(workers()[-1][0]), signal.SIGKILL)
        elif event == "node":
            cluster.remove_node(second, allow_graceful=False)

    threading.Thread(target=disturb, daemon=True).start()
    report = ps.prepare(
        source, tokenizer=tokenizer, output=output, executor="ray", transform=prepared, part_bytes=12_000,
        validation=0.2, drop_duplicates=True, progress=False,
    )  # fmt: skip
    print(json.dumps([report.documents, report.num_duplicates, len(nodes())]))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
