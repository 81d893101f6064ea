"""Serving: a model behind OpenAI's HTTP API, with a chat page.

Settings need no FastAPI, uvicorn or torch; everything else is imported on first use.

```python
model = ServedModel(
    name="tiny", engine=engine, tokenizer=tokenizer, template=template, context_length=engine.context_length
)
Server(model, ServeSettings(port=8000)).serve_until_stopped()
```
"""  # noqa: E501

from penstock.core.lazy_imports import lazy
from penstock.use.serving.settings import ServeSettings

with lazy(__name__):
    from penstock.use.serving.served_model import ServedModel
    from penstock.use.serving.server import Server

__all__ = ["ServeSettings", "ServedModel", "Server"]
