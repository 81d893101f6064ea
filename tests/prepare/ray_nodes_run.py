"""Run by test_prepare_ray_nodes.py: prepares on a cluster of two nodes of this machine, of which
one is lost meanwhile.

Arguments: the source, the tokenizer, the output; for a URL, also its folder on this machine, which
nodes then do not see.
Prints one JSON line: the report's numbers and the nodes that worked.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import ray
from prepare_cases import blind

import penstock as ps
from makers.ray_clusters import begin_cluster
from patience import PATIENCE_SECONDS

_both = []


def prepared(record):
    """A transform that takes its time, and notes which process of which node works; first it waits
    for both nodes.
    """
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
    return (
        [line.split() for line in path.read_text().splitlines() if " " in line]
        if path.exists()
        else []
    )


def nodes():
    return {node for _, node in workers()}


def main():
    source, tokenizer, output, *folder = sys.argv[1:]
    if folder:
        blind(SimpleNamespace(setattr=setattr))
    work = Path(*folder or [output], ".prepare")
    cluster, (_, second) = begin_cluster()

    def disturb():
        while len(nodes()) < 2 or len(list(work.glob("part-*.json"))) < 2:
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)

    threading.Thread(target=disturb, daemon=True).start()
    report = ps.prepare(
        source,
        tokenizer=tokenizer,
        output=output,
        executor="ray",
        transform=prepared,
        part_bytes=12_000,
        validation=0.2,
        drop_duplicates=True,
        progress=False,
    ).report
    print(json.dumps([report.documents, report.num_duplicates, len(nodes())]))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
