"""Generation: continuous batching over a key-value cache, reproducible sampling, chats with a
rolling window.

Settings need no torch; everything else is imported on first use.

```python
engine = Engine(model, tokenizer, context_length=1024, stop_ids=run.stop_ids)
for event in engine.generate([ids], Sampling(temperature=0.7, seed=1)):
    print(event.text, end="", flush=True)
```
"""

from penstock.core.lazy_imports import lazy
from penstock.learn.generation.settings import Sampling

with lazy(__name__):
    from penstock.learn.generation.engine import Engine
    from penstock.learn.generation.session import ChatSession, Prompt, Reply
    from penstock.learn.generation.settings import Event, Generated, LogProbabilities
    from penstock.learn.generation.unmask_settings import Unmasking
    from penstock.learn.generation.unmasking import Unmasker

__all__ = [
    "ChatSession",
    "Engine",
    "Event",
    "Generated",
    "LogProbabilities",
    "Prompt",
    "Reply",
    "Sampling",
    "Unmasker",
    "Unmasking",
]
