"""Run by test_ray_train.py: a cluster of two nodes on this machine, one of which is lost, and comes
back.

Arguments: the dataset, a folder, the mode (`kill` or `node`). Prints one JSON line: Ray's last
metrics.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ray

from makers.ray_clusters import STORE, begin_cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_ray

STEPS = 14


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_until(happened):
    end = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def main():
    dataset, folder, mode = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    log = folder / "log"

    def on_step(step, rank, size, loss):
        rows = [
            [rank * len(step) + n, hashlib.sha1(row.tokens).hexdigest()[:12]]
            for n, row in enumerate(step)
        ]
        with open(log, "a") as file:
            file.write(json.dumps([step.index, size, loss, os.getpid(), rows]) + "\n")
        time.sleep(0.5)
        while mode == "node" and size == 1 and step.index >= 8:
            time.sleep(1)  # until Ray ends this worker, to begin again with two

    cluster, (_, second) = begin_cluster()
    returned = []

    def disturb():
        wait_until(lambda: any(line[0] >= 3 and line[1] == 2 for line in lines(log)))
        if mode == "kill":
            os.kill(lines(log)[-1][3], signal.SIGKILL)
            return
        cluster.remove_node(second, allow_graceful=False)
        wait_until(lambda: any(line[1] == 1 for line in lines(log)))
        words = [
            "start",
            f"--address={cluster.address}",
            "--num-cpus=1",
            f"--object-store-memory={STORE}",
            "--block",
        ]
        returned.append(
            subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", *words], stdout=2)
        )

    threading.Thread(target=disturb, daemon=True).start()
    try:
        workers = [1, 2] if mode == "node" else [2]
        result = train_ray.run(
            dataset, folder / "run", STEPS, workers, interval=1.0, save_every=2, on_step=on_step
        )
        print(json.dumps(result.metrics))
    finally:
        ray.shutdown()
        for node in returned:
            node.terminate()
            node.wait()
        cluster.shutdown()


if __name__ == "__main__":
    main()
