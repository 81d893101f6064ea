"""The same steps by transformers alone, and logits of both sides, for tests of real models."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import penstock as ps

IGNORE = -100
Labelled = tuple[list[int], list[int]]
"""Ids of a chat, and its labels: `IGNORE` but for the reply and the token that ends it."""


def labelled(tokenizer: Any, messages: Sequence[dict[str, str]]) -> Labelled:
    """A chat as transformers encodes it; the last message is trained."""
    ids = list(tokenizer.apply_chat_template(messages)["input_ids"])
    begin = len(
        tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    )
    end = max(place for place, token in enumerate(ids) if token == tokenizer.eos_token_id) + 1
    return ids, [token if begin <= place < end else IGNORE for place, token in enumerate(ids)]


def chats_of_steps(loader: ps.Loader, steps: int) -> list[list[tuple[int, ...]]]:
    """The documents of the first steps of a loader."""
    found = []
    for step in loader:
        if step.index == steps:
            break
        found.append([
            tuple(row.tokens[begin:end].tolist())
            for row in step
            for begin, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True)
            if end <= row.num_tokens
        ])  # fmt: skip
    return found


def train_theirs(
    model: Any, steps: Sequence[Sequence[Labelled]], *, learning_rate: float
) -> list[float]:
    """AdamW on the mean cross entropy of each step's labels, a chat at a time; the loss of each
    step.
    """
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for chats in steps:
        targets = sum(label != IGNORE for _, labels in chats for label in labels)
        loss = 0.0
        for ids, labels in chats:
            share = nats(model, ids, labels) / targets
            share.backward()
            loss += float(share.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def nats(model: Any, ids: list[int], labels: list[int]) -> Any:
    """The cross entropy of a chat's labels, summed."""
    import torch

    logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")


def their_loss(model: Any, chats: Sequence[Labelled]) -> float:
    """The mean cross entropy of all labels."""
    import torch

    with torch.no_grad():
        total = sum(float(nats(model, *chat)) for chat in chats)
    return total / sum(label != IGNORE for _, labels in chats for label in labels)


def our_logits(folder: str | Path, *documents: list[int]) -> Any:
    """Logits [tokens, vocabulary] of a run or a folder by penstock, of documents in one row."""
    import torch

    from penstock.learn.evaluation.subject import packed

    model = ps.load_model(folder).eval()
    with torch.no_grad():
        return model.logits(model(model.tensors(packed(documents)))[0])


def their_logits(model: Any, *documents: list[int]) -> Any:
    """The same by a model of transformers, each document alone."""
    import torch

    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in documents])


def furthest(ours: Any, theirs: Any) -> float:
    """The largest difference of two matrices of logits."""
    return float((ours - theirs).abs().max())


def borrow_model(folder: Path, target: Path) -> Path:
    """A folder with the same model, whose small files may be changed."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file)
        else:
            shutil.copy(file, target / file.name)
    return target
