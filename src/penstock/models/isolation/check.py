"""Checks that a model keeps the documents of a row apart: two exact tests on a few random tokens.

*Equal logits*: each document in a packed row must give the same logits as the document alone, up to
rounding. This finds wrong positions, masks that reach across documents, carried-over states and
shared expert capacity.

*No gradient*: the gradient of a document's logits with respect to the embeddings of every other
document must be zero to the last bit. This finds leaks of any size, in any dtype.

Some models of transformers behave differently above a length that their settings name, such as a
sliding window; rows that reach beyond these lengths are tested too. The check costs one forward and
one backward pass per document plus two, over a few dozen tokens. The model, its modes and the
random generators are left as they were.
"""

from collections.abc import Sequence

from penstock.core.errors import IsolationError
from penstock.core.suggestions import suggests
from penstock.media.rows import BlankImage
from penstock.models.isolation.calls import (
    Forward,
    TorchModel,
    explained,
    transformers_forward,
)
from penstock.models.isolation.documents import changing_rotary, try_isolation
from penstock.models.isolation.images import forward_of_images, try_images
from penstock.models.isolation.lengths import DOCUMENT_LENGTHS, longer_documents, rotary_limit
from penstock.models.isolation.report import IsolationReport
from penstock.models.isolation.trees import try_tree


@suggests
def check_isolation(
    model: TorchModel,
    *,
    forward: Forward | None = None,
    lengths: Sequence[int] = DOCUMENT_LENGTHS,
    sequence_length: int | None = None,
    trees: bool = False,
    images: BlankImage | None = None,
    seed: int = 0,
) -> IsolationReport:
    """Refuse a model that lets documents of one row see each other.

    Args:
        model: A torch module, unwrapped (before DDP or FSDP), on any device and in any dtype.
        forward: (model, row) → logits [T, vocabulary]; `to_torch(row)` gives tensors. By default
            the call of a transformers causal language model with the arguments of
            `penstock.huggingface.model_inputs`, as the Trainer trains it.
        lengths: Tokens of the documents in the test row.
        sequence_length: Slots of the rows that the model will see. If the model's settings name
            shorter lengths, such as a sliding window, longer documents are tested too. Some rotary
            embeddings change for all documents of a batch if one exceeds a limit; the model is
            refused if such a document fits a row. None: neither.
        trees: Also try a prefix tree, whose branches must not see each other: for models that get
            such documents.
        images: Also try documents with images of noise, which must not change other documents: the
            blank image of a loader's rows (`row.media.blank`).
        seed: Seed of the random tokens.

    Raises:
        IsolationError: Documents see each other, or the model cannot be checked; says how much, and
            the cure.
    """
    if sequence_length is not None:
        refuse_changing_rotary(model, sequence_length)
    plain = transformers_forward if images is None else forward_of_images
    forward = plain if forward is None else explained(forward)
    report = try_isolation(model, forward, lengths=lengths, seed=seed)
    longer = None if sequence_length is None else longer_documents(model, sequence_length)
    if longer is not None:
        try_isolation(model, forward, lengths=longer, seed=seed, gradients=False)
    if trees:
        try_tree(model, forward, seed=seed)
    if images is not None:
        try_images(model, images, forward, seed=seed)
    return report


def refuse_changing_rotary(model: TorchModel, sequence_length: int) -> None:
    """Refuse a model with rotary frequencies that depend on the longest document of a batch, if one
    can be long enough.

    Raises:
        IsolationError: The model is one of these.
    """
    found = rotary_limit(model)
    if found is not None and sequence_length > found[0]:
        raise IsolationError(changing_rotary(model, sequence_length, *found))
