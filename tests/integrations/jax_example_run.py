"""Run by test_jax_example.py: the example of the package's docstring, on several devices. Argument:
the dataset.

What the example leaves to its reader is given here: a model, its parameters, and where to save.
Rows are shorter.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from penstock import jax as psj

VOCABULARY, WIDTH, STEPS = 64, 16, 5


class EnoughError(Exception):
    """Ends the example, whose loader never ends."""


def model(parameters, tokens, positions, mask):
    """One layer of attention."""
    hidden = parameters["in"][tokens] + jnp.sin(positions[..., None] / jnp.arange(1, WIDTH + 1))
    return (
        jax.nn.dot_product_attention(*(hidden[:, :, None],) * 3, mask=mask)[:, :, 0]
        @ parameters["out"]
    )


def main() -> None:
    code = psj.__doc__.split("```python\n")[1].split("```")[0]
    for given, small in (
        ("data/web", Path(sys.argv[1]).as_posix()),
        ("4096", "64"),
        ("rows_per_step=64", "rows_per_step=8"),
    ):
        assert code.count(given) == 1, given
        code = code.replace(given, small)
    states = []

    def save(parameters, state):
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(parameters))
        states.append(state)
        if len(states) == STEPS:
            raise EnoughError

    key = jax.random.key(0)
    parameters = {
        "in": jax.random.normal(key, (VOCABULARY, WIDTH)),
        "out": jnp.zeros((WIDTH, VOCABULARY)),
    }
    names = {"model": model, "parameters": parameters, "save": save}
    try:
        exec(compile(code, "the docstring", "exec"), names)
    except EnoughError:
        print(
            jax.device_count(),
            len(names["batch"].tokens.addressable_shards),
            float(names["value"]),
            names["train"]._cache_size(),
        )


if __name__ == "__main__":
    main()
