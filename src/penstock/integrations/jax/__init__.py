"""JAX: a loader's rows as arrays of static shape, their attention mask, and denoising inside jit.

```python
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import penstock as ps
from penstock import jax as psj

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
parameters = jax.device_put(parameters, NamedSharding(mesh, PartitionSpec()))      # a copy on each device
loader = ps.Loader(ps.Source("data/web"), sequence_length=4096, rows_per_step=64,
                   data_parallel=psj.data_parallel(mesh))

@jax.jit
def train(parameters, batch):
    def loss(parameters):
        mask = psj.attention_mask(batch.segment_ids, batch.prefix)
        scores = jax.nn.log_softmax(model(parameters, batch.tokens, batch.positions, mask))
        picked = jnp.take_along_axis(scores, batch.targets[..., None], axis=-1)[..., 0]
        return -(picked * batch.loss_weights).sum() / batch.loss_denominator
    value, slopes = jax.value_and_grad(loss)(parameters)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, slopes)

for batch, step in psj.batches(loader, mesh=mesh, prefix=True):      # this model reads batch.prefix
    value, parameters = train(parameters, batch)      # traced once
    save(parameters, step.resume_state)
```

The axis is Auto, so that XLA splits the work of each function by rows; `make_mesh` alone makes
Explicit axes, for which every operation must say how its result is split. `prefix` says whether the
model supports bidirectional prefixes. If an objective makes some (denoising), only True is
accepted: a model that ignores `batch.prefix` would train on the wrong task.

`BatchIterator` gives the same batches with a state, `grain_iterator` as an iterator of Grain, for
Orbax. `splash_attention` needs no T × T mask; `segment_ids` and `prefix_segment_ids` are what other
such kernels take.

All integers are int32, so `jax_enable_x64` changes nothing. `Denoiser` and `denoise` do on the
device what `penstock.Denoise` does, bit for bit; a loader with that objective has already done it,
at lower cost.

Importing this module needs jax (`pip install 'penstock[jax]'`).
"""  # noqa: E501

from penstock.core.errors import MissingExtraError
from penstock.core.lazy_imports import public_names

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise MissingExtraError("jax", "jax") from error

from penstock.integrations.jax.attention import prefix_segment_ids, segment_ids, splash_attention
from penstock.integrations.jax.batch import REQUIREMENTS, Batch, attention_mask
from penstock.integrations.jax.batches import batches, data_parallel
from penstock.integrations.jax.denoising import (
    Denoised,
    Denoiser,
    denoise,
    denoise_batch,
    split_keys,
)
from penstock.integrations.jax.iterator import BatchIterator, grain_iterator
from penstock.integrations.jax.spans import DenoiseSettings

__all__ = [
    "REQUIREMENTS",
    "Batch",
    "BatchIterator",
    "DenoiseSettings",
    "Denoised",
    "Denoiser",
    "attention_mask",
    "batches",
    "data_parallel",
    "denoise",
    "denoise_batch",
    "grain_iterator",
    "prefix_segment_ids",
    "segment_ids",
    "splash_attention",
    "split_keys",
]

__dir__ = public_names(__name__)
