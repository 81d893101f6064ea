"""Serving: a model behind HTTP as OpenAI's clients speak it, with a chat page.

Settings can be read without FastAPI, uvicorn or torch; everything else is imported when it is first used.

```python
model = ServedModel(
    name="tiny", engine=engine, tokenizer=tokenizer, template=template, context_length=engine.context_length
)
Server(model, ServeSettings(port=8000)).serve_until_stopped()
```
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.serving.settings import ServeSettings

if TYPE_CHECKING:
    from penstock.serving.served_model import ServedModel
    from penstock.serving.server import Server

_LATE = {"Server": "server", "ServedModel": "served_model"}
"""Name → the module that is loaded when it is first used."""

__all__ = ["ServeSettings", "ServedModel", "Server"]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.errors import MissingExtraError

    try:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name in ("fastapi", "starlette", "uvicorn"):
            raise MissingExtraError(error.name, "serve") from error
        raise
