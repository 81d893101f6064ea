"""Serving: a model behind HTTP as OpenAI's clients speak it, with a chat page.

Settings can be read without FastAPI, uvicorn or torch; everything else is imported when it is first used.

```python
model = ServedModel(
    name="tiny", engine=engine, tokenizer=tokenizer, template=template, context_length=engine.context_length
)
Server(model, ServeSettings(port=8000)).serve_until_stopped()
```
"""

from typing import TYPE_CHECKING, Any

from penstock.late import import_late
from penstock.serving.settings import ServeSettings

if TYPE_CHECKING:
    from penstock.serving.served_model import ServedModel
    from penstock.serving.server import Server

_LATE = {"Server": "server", "ServedModel": "served_model"}
"""Name → the module that is loaded when it is first used."""

__all__ = ["ServeSettings", "ServedModel", "Server"]


def __getattr__(name: str) -> Any:
    return import_late(__name__, _LATE, name)
