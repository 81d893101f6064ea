"""Chats: conversations become tokens with loss weights, and a certificate of what is trained.

```python
chat = ps.chat.encode(messages, tokenizer="Qwen3-0.6B/", mask_history=True)
chat.tokens, chat.loss_weights, chat.certificate
```
"""

from penstock.chat.boundaries import Boundary, ResolvedBoundary, resolve
from penstock.chat.certificate import Certificate, Dropped, Problem
from penstock.chat.conversation import Conversation, Marks, Range
from penstock.chat.encoder import ChatEncoder, EncodedChat, encode
from penstock.chat.families import Family, detect_family, families, family
from penstock.chat.knobs import Knobs
from penstock.chat.layouts import LayoutSettings, describe_layout, detect_layout, read_conversation
from penstock.chat.scanning import scan
from penstock.chat.template import Rendered, Template, load_template, own_template, template_names

__all__ = [
    "Boundary",
    "Certificate",
    "ChatEncoder",
    "Conversation",
    "Dropped",
    "EncodedChat",
    "Family",
    "Knobs",
    "LayoutSettings",
    "Marks",
    "Problem",
    "Range",
    "Rendered",
    "ResolvedBoundary",
    "Template",
    "describe_layout",
    "detect_family",
    "detect_layout",
    "encode",
    "families",
    "family",
    "load_template",
    "own_template",
    "read_conversation",
    "resolve",
    "scan",
    "template_names",
]
