"""A call of attention for each document: no wasted products between documents, so the way of the CPU.

There it is one operation (`cpu_op`). Elsewhere it is a row of `scaled_dot_product_attention`, whose masks for documents
with prefixes are made once a row: rest × document numbers each.
"""

import torch
from torch import Tensor

from penstock.inputs import AttentionRule
from penstock.models.attention.backend import Attend, Backend, attend_heads
from penstock.models.attention.calls import calls
from penstock.models.attention.cpu_op import attend_documents


def prepare_operation(rule: AttentionRule) -> Attend:
    """As one operation on the CPU."""
    pieces = torch.tensor(rule.pieces, dtype=torch.int64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend_documents(q, k, v, pieces)[0]
        return out

    return attend


def prepare_calls(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    """As calls of torch's own attention, on any device.

    Queries, keys and values are split and outputs joined in one operation each; slices instead would each have a
    backward pass over the whole row.
    """
    made = list(calls(rule.pieces.tolist(), device, dtype))
    counts = [call.queries.stop - call.queries.start for call in made]
    lengths = (rule.pieces[:, 2] - rule.pieces[:, 0]).tolist()
    documents = {begin: number for number, begin in enumerate(rule.pieces[:, 0].tolist())}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = k.split(lengths), v.split(lengths)
        outputs = []
        for call, queries in zip(made, q.split(counts), strict=True):
            document, seen = documents[call.keys.start], call.keys.stop - call.keys.start
            outputs.append(
                attend_heads(
                    queries, keys[document][:seen], values[document][:seen], mask=call.mask, causal=call.causal
                )
            )
        return torch.cat(outputs)

    return attend


def _prepare(rule: AttentionRule, device: torch.device, dtype: torch.dtype) -> Attend:
    return prepare_operation(rule) if device.type == "cpu" else prepare_calls(rule, device, dtype)


PER_DOCUMENT = Backend(name="per_document", refusal=lambda rule, device, dtype: None, prepare=_prepare)
