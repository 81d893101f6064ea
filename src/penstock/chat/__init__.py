"""Chats: conversations become tokens with loss weights, and a certificate of what they train.

```python
chat = ps.chat.encode(messages, tokenizer="Qwen3-0.6B/", mask_history=True)
chat.tokens, chat.loss_weights, chat.certificate
```
"""

from penstock.chat.encoded_chat import EncodedChat
from penstock.chat.encoder import ChatEncoder, encode
from penstock.chat.masks.boundaries import Boundary, ResolvedBoundary, resolve
from penstock.chat.masks.certificate import Certificate, Dropped, Problem
from penstock.chat.masks.families import Family, detect_family, families, family
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.masks.scanning import scan
from penstock.chat.records.conversation import Conversation, MessageWeights, Range
from penstock.chat.records.layout_settings import LayoutSettings
from penstock.chat.records.layouts import detect_layout, read_conversation
from penstock.chat.render.template import Rendered, Template, load_template, template_names
from penstock.chat.trajectories.finished import FinishedTrajectory
from penstock.chat.trajectories.paths import TokenPath
from penstock.chat.trajectories.proof import TrajectoryCertificate
from penstock.chat.trajectories.records import TrajectoryReader
from penstock.chat.trajectories.trajectory import Step, Trajectory
from penstock.core.lazy_imports import public_names

__all__ = [
    "Boundary",
    "Certificate",
    "ChatEncoder",
    "Conversation",
    "Dropped",
    "EncodedChat",
    "Family",
    "FinishedTrajectory",
    "LayoutSettings",
    "MaskSettings",
    "MessageWeights",
    "Problem",
    "Range",
    "Rendered",
    "ResolvedBoundary",
    "Step",
    "Template",
    "TokenPath",
    "Trajectory",
    "TrajectoryCertificate",
    "TrajectoryReader",
    "detect_family",
    "detect_layout",
    "encode",
    "families",
    "family",
    "load_template",
    "read_conversation",
    "resolve",
    "scan",
    "template_names",
]

__dir__ = public_names(__name__)
