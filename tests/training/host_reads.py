"""Counts what would make a host wait for a GPU, on the CPU, where nothing waits.

`READS` turn a tensor into numbers, or give a tensor whose shape depends on values. A *blocking
copy* sends an array of the host by `Tensor.to` or `torch.tensor(…, device=…)`: memory of NumPy is
not page-locked, so a GPU first does all that was queued before. `on_device` waits for nothing.
"""

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from penstock.learn.training import Trainer

READS = ("item", "tolist", "nonzero", "cpu", "__float__", "__int__", "__bool__", "__index__")
CPU_ALONE = ("models/attention/", "tensor_logs.py")
"""Code whose numbers are on the host on every device, or that runs when a user asks for it."""
SENDERS = ("torch_tensors.py",)
"""Where copies are from page-locked memory."""


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Places in the package that read a tensor, or send one and wait, while the block runs."""
    found: Counter[str] = Counter()

    def see(name: str, elsewhere: tuple[str, ...]) -> None:
        own = [
            f"{frame.filename.split('/penstock/')[-1]}:{frame.lineno} {name}"
            for frame in traceback.extract_stack()[:-2]
            if "/src/penstock/" in frame.filename
        ]
        if own and not any(part in own[-1] for part in elsewhere):
            found[own[-1]] += 1

    def watch(name: str) -> None:
        before = getattr(torch.Tensor, name)

        def call(self, *args, **given):
            see(name, CPU_ALONE)
            return before(self, *args, **given)

        patch.setattr(torch.Tensor, name, call)

    def watch_copies() -> None:
        of_host: dict[int, torch.Tensor] = {}  # kept, or another tensor would get its address
        made, sent, listed = torch.from_numpy, torch.Tensor.to, torch.tensor

        def from_numpy(array):
            tensor = made(array)
            if tensor.numel():
                of_host[tensor.data_ptr()] = tensor
            return tensor

        def to(self, *args, **given):
            if self.data_ptr() in of_host and (
                "device" in given or any(isinstance(one, torch.device) for one in args)
            ):
                see("to", SENDERS)
            return sent(self, *args, **given)

        def tensor(*args, **given):
            if given.get("device") is not None:
                see("tensor", SENDERS)
            return listed(*args, **given)

        patch.setattr(torch, "from_numpy", from_numpy)
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch, "tensor", tensor)

    with monkeypatch.context() as patch:
        for name in READS:
            watch(name)
        watch_copies()
        yield found


def reads_of_a_step(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the third step: things that are made once are there."""
    step, calls, found = Trainer._step, [], Counter()

    def watched(self, *args):
        calls.append(1)
        if len(calls) != 3:
            return step(self, *args)
        with counted(monkeypatch) as mine:
            record = step(self, *args)
        found.update(mine)
        return record

    monkeypatch.setattr(Trainer, "_step", watched)
    assert len(list(trainer.train())) == 3
    return found
