"""What the process that others are forked from has imported, each of it if it is installed.

Collecting garbage is off meanwhile, and passes over all of it afterwards: children would copy the
memory of what they look at.
"""

import contextlib
import gc
import importlib

MODULES = (
    "numba",
    "pyarrow",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "penstock.use.cli",
    "penstock.use.cli.train",
    "penstock.use.config.training",
    "penstock.learn.training",
    "penstock.learn.distillation",
)

gc.disable()
for name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    # The checks of run files are built once in a process.
    importlib.import_module("penstock.use.config.run_file").run_schema()
gc.freeze()
# A run of several ranks thaws all objects as it ends, and the next would first walk through these.
gc.unfreeze = gc.freeze
gc.enable()
