"""Trains a small transformer with Flax on a loader, on one device or many, in one process or
several; resumes exactly.

    python examples/train_jax.py DATASET RUN --steps 40
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/train_jax.py DATASET RUN
    python examples/train_jax.py DATASET RUN --coordinator localhost:1234 --processes 2 --process 0    # and --process 1

Stopped anywhere and started again, it goes on after the last checkpoint with the batches and losses
of a run that was never stopped, also on another number of devices or processes (losses are then
equal up to rounding). Needs `pip install flax optax orbax-checkpoint`.
"""  # noqa: E501

import argparse
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import penstock as ps
from penstock import jax as psj

LAYERS, WIDTH, HEADS, SLOTS, ROWS = 2, 64, 4, 64, 16


def rotate(x, positions):
    """Rotary positions of x [B, T, heads, size], from 0 in each document."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1
    )


class Block(nnx.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, rngs):
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, positions, mask):
        """[B, T, width] → the same."""
        q, k, v = jnp.split(self.qkv(self.norms[0](x)).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        # The mask keeps documents apart. On TPUs: psj.splash_attention(q, k, v, batch.segment_ids,
        # batch.prefix).
        seen = jax.nn.dot_product_attention(
            rotate(q, positions), rotate(k, positions), v, mask=mask
        )
        x = x + self.out(seen.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """A decoder over packed rows."""

    def __init__(self, vocab_size, rngs):
        self.embedding = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, batch):
        """Logits [B, T, vocabulary] of a batch."""
        mask = psj.attention_mask(batch.segment_ids, batch.prefix)
        x = self.embedding(batch.tokens)
        for block in self.blocks:
            x = block(x, batch.positions, mask)
        return self.head(self.norm(x))


def loss_of(model, batch):
    """Cross entropy over the denominator of the whole step: the sum over devices and processes is
    the step's loss.
    """
    logits = model(batch).astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return (nats * batch.loss_weights).sum() / batch.loss_denominator


@nnx.jit
def train_step(model, optimizer, batch):
    """Take one step; returns its loss."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


def digest(batch):
    """A hash of this process's rows, to show that batches repeat."""
    rows = np.concatenate([np.asarray(shard.data) for shard in batch.tokens.addressable_shards])
    return hashlib.sha1(rows.tobytes()).hexdigest()[:12]


def train(dataset, run, steps, save_every=5):
    """Train to a number of steps, from the last checkpoint of the run if there is one; yields
    (step, loss, digest).
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    loader = ps.Loader(
        dataset,
        sequence_length=SLOTS,
        rows_per_step=ROWS,
        seed=1,
        data_parallel=psj.data_parallel(mesh),
    )
    batches = psj.BatchIterator(loader, mesh=mesh, max_documents=SLOTS, prefix=True)
    vocab_size = ps.open_dataset(dataset).tokenizer.vocab_size
    model = Transformer(vocab_size, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    # A copy on each device; nnx.update puts the arrays back into model and optimizer.
    state = jax.device_put(nnx.state((model, optimizer)), NamedSharding(mesh, PartitionSpec()))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(Path(run).absolute(), options=options) as manager:
        if (last := manager.latest_step()) is not None:
            restored = manager.restore(
                last,
                # The loader's state is JSON and the same in every process, so it fits any number of
                # processes.
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore()
                ),
            )
            state = restored["state"]
            batches.set_state(restored["data"])
        nnx.update((model, optimizer), state)
        while batches.step < steps:
            number, batch = batches.step, next(batches)
            loss = train_step(model, optimizer, batch)
            yield number, float(loss), digest(batch)
            if (number + 1) % save_every == 0:
                parts = {
                    "state": ocp.args.StandardSave(nnx.state((model, optimizer))),
                    "data": ocp.args.JsonSave(batches.get_state()),
                }
                manager.save(number + 1, args=ocp.args.Composite(**parts))
        manager.wait_until_finished()


def main():
    """Train as the command line says, and print a line of JSON for each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset")
    parser.add_argument("run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--coordinator", help="address of process 0, for several processes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    given = parser.parse_args()
    if given.coordinator:
        jax.distributed.initialize(given.coordinator, given.processes, given.process)
    for number, loss, rows in train(given.dataset, given.run, given.steps):
        print(json.dumps([number, loss, rows]), flush=True)


if __name__ == "__main__":
    main()
