"""Generation: continuous batching over a cache of keys and values, sampling that reproduces, chats whose window rolls.

Settings can be read without torch; everything else is imported when it is first used.

```python
engine = Engine(model, tokenizer, context_length=1024, stop_ids=run.stop_ids)
for event in engine.generate([ids], Sampling(temperature=0.7, seed=1)):
    print(event.text, end="", flush=True)
```
"""

from typing import TYPE_CHECKING, Any

from penstock.generation.settings import Sampling
from penstock.late import import_late

if TYPE_CHECKING:
    from penstock.generation.engine import Engine
    from penstock.generation.events import Event, Generated, LogProbabilities
    from penstock.generation.prompt import Prompt, begin_ids, end_ids, fit_chat
    from penstock.generation.session import ChatSession, Reply

_LATE = {
    "ChatSession": "session",
    "Engine": "engine",
    "Event": "events",
    "Generated": "events",
    "LogProbabilities": "events",
    "Prompt": "prompt",
    "Reply": "session",
    "begin_ids": "prompt",
    "end_ids": "prompt",
    "fit_chat": "prompt",
}
"""Name → the module that is loaded when it is first used."""

__all__ = [
    "ChatSession",
    "Engine",
    "Event",
    "Generated",
    "LogProbabilities",
    "Prompt",
    "Reply",
    "Sampling",
    "begin_ids",
    "end_ids",
    "fit_chat",
]


def __getattr__(name: str) -> Any:
    return import_late(__name__, _LATE, name)
