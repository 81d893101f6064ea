"""Run by test_jax_mesh.py in processes of their own, because JAX takes the number of its devices
when it starts.

Arguments: the dataset, the processes, this process, a port. Each has 8 / processes devices. Prints
one JSON line.
"""

import json
import sys
from itertools import islice
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_models import make_loader

from penstock import jax as psj
from penstock.core.errors import ConfigError, DistributedError

ROWS = 16


def message(error, call):
    try:
        call()
    except error as raised:
        return str(raised)
    return "nothing was raised"


def main() -> None:
    data, processes, process = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if processes > 1:
        jax.distributed.initialize(f"localhost:{sys.argv[4]}", processes, process)
    assert (jax.device_count(), jax.local_device_count()) == (8, 8 // processes)
    mesh = jax.make_mesh((8,), ("data",))
    place = psj.data_parallel(mesh)

    def loader(ranks=(place.rank, place.size), rows=ROWS, **options):
        return make_loader(data, rows=rows, ranks=ranks, max_epochs=1, **options)

    traces = []

    @jax.jit
    def trained(batch):
        traces.append(None)
        return (
            batch.loss_weights * batch.tokens
        ).sum() / batch.loss_denominator, batch.num_documents.sum()

    results, shapes, shards = [], set(), set()
    for batch, step in psj.batches(loader(), mesh=mesh):
        shapes.add(batch.tokens.shape)
        assert batch.tokens.sharding == NamedSharding(mesh, PartitionSpec("data"))
        assert batch.loss_denominator.sharding.is_fully_replicated
        for shard in batch.tokens.addressable_shards:
            row = shard.index[0].start
            shards.add((row, shard.data.shape))
            local = row - place.rank * ROWS // place.size
            if local + 1 < len(step):
                np.testing.assert_array_equal(
                    shard.data, [step[local].tokens, step[local + 1].tokens]
                )
        share, documents = trained(batch)
        results.append([step.index, float(share), int(documents)])

    devices = np.array(jax.devices())
    square = Mesh(devices.reshape(4, 2), ("data", "model"))
    square_place = psj.data_parallel(square)
    square_ranks = (square_place.rank, square_place.size)
    halves = next(psj.batches(loader(square_ranks), mesh=square))[0]
    both = Mesh(devices.reshape(2, 4), ("replica", "fsdp"))
    pair = next(psj.batches(loader(), mesh=both, axis=("replica", "fsdp")))[0]
    other = (place.rank, place.size + 1 if place.size > 1 else 2)
    odd = 6 * place.size
    print(
        json.dumps(
            {
                "place": [place.rank, place.size],
                "results": results,
                "traces": len(traces),
                "shapes": sorted(shapes),
                "shards": sorted(shards),
                "square": [
                    square_ranks,
                    halves.tokens.shape,
                    halves.tokens.sharding.shard_shape(halves.tokens.shape),
                ],
                "pair": pair.tokens.sharding.shard_shape(pair.tokens.shape),
                "first": [list(row.tokens.tolist()) for row in islice(next(iter(loader())), 2)],
                "another seed": message(
                    ConfigError, lambda: psj.batches(loader(seed=process), mesh=mesh)
                ),
                "another size": message(
                    ConfigError,
                    lambda: psj.BatchIterator(
                        loader(), mesh=mesh, batch_size=ROWS // processes // (1 + process)
                    ),
                ),
                "wrong place": message(
                    DistributedError,
                    lambda: psj.batches(loader(other, rows=ROWS * other[1]), mesh=mesh),
                ),
                "no mesh": message(DistributedError, lambda: psj.batches(loader((0, 1)))),
                "rows": message(ConfigError, lambda: psj.batches(loader(rows=odd), mesh=mesh)),
                "axis": message(ConfigError, lambda: psj.batches(loader(), mesh=mesh, axis="rows")),
                "order": message(
                    ConfigError,
                    lambda: psj.data_parallel(Mesh(devices.reshape(2, 4).T.reshape(-1), ("data",))),
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
