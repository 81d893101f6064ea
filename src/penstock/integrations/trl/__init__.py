"""TRL: its `SFTTrainer` fed by a loader, with exact resume, and its `DPOTrainer` on prepared pairs.

```python
trainer = ps.trl.SFTTrainer(model, SFTConfig("run", max_steps=1000), loader=loader, processing_class=tokenizer)
trainer.train(resume_from_checkpoint=True)
```

Batches, resuming and evaluation are penstock's; the loss, metrics, PEFT and everything else are
TRL's. It needs `pip install 'penstock[huggingface]' trl`.
"""  # noqa: E501

from penstock.core.errors import MissingExtraError
from penstock.core.lazy_imports import lazy

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise MissingExtraError("transformers", "huggingface") from error

from penstock.integrations.trl.preferences import preference_pairs

with lazy(__name__):
    from penstock.integrations.trl.dpo import DPOTrainer
    from penstock.integrations.trl.sft import SFTTrainer

__all__ = ["DPOTrainer", "SFTTrainer", "preference_pairs"]
