"""The next token of each sequence of a batch: which tokens are allowed, the draw, and the
log-probabilities to report.

The device gets all that the host knows in one copy, and the host reads one tensor: tokens, whether
logits were finite, and log-probabilities where they are asked for.
"""

from collections.abc import Collection
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.learn.generation.sampling import (
    Changes,
    Sampler,
    change,
    check_finite,
    draw,
    log_probabilities,
)
from penstock.learn.generation.sequence import Sequence
from penstock.learn.generation.settings import LogProbabilities
from penstock.plan.inputs.torch_tensors import together_on_device


@final
class Chooser:
    """Chooses tokens for the sequences of one engine.

    Args:
        forbidden: Ids that are never chosen.
        stops: Ids that end a sequence; not chosen while it may not stop.
        device: Of the logits.
    """

    def __init__(
        self, forbidden: Collection[int], stops: Collection[int], device: torch.device
    ) -> None:
        self._forbidden = torch.tensor(sorted(forbidden), dtype=torch.int64, device=device)
        self._stops = sorted(stops)
        self._device = device
        self._samplers: tuple[tuple[int, ...], Sampler] | None = None

    def choose(
        self, group: list[Sequence], logits: Tensor
    ) -> tuple[list[int], list[LogProbabilities | None]]:
        """A token for each of B sequences, from logits [B, vocab]; and the log-probabilities of
        those that ask for them, an empty list if none does.

        Raises:
            StateError: Logits are not finite, or no token of a row may be chosen.
        """
        sampler = self._sampler(group)
        sent = together_on_device(
            self._parts(group, logits.shape[-1], greedy=sampler.greedy), logits.device
        )
        chosen, finite = sampler.pick(self._allowed(logits, sent), sent.get("numbers"))
        asked = [each.sampling.logprobs for each in group]
        most = max((each for each in asked if each is not None), default=None)
        if most is None:
            # −1: no token.
            ids: list[int] = torch.where(finite, chosen, -1).tolist()
            check_finite(min(ids) >= 0)
            return ids, []
        if "warm" in sent:
            logits = logits / sent["warm"].to(logits.dtype)[:, None]
        own, values, likeliest = log_probabilities(logits, chosen, most)
        # Ids and narrower floats are exact in float64.
        columns = [x.double() for x in (finite[:, None], chosen[:, None], own[:, None])]
        rows = torch.cat([*columns, likeliest.double(), values.double()], 1).tolist()
        check_finite(all(row[0] for row in rows))
        count = likeliest.shape[1]
        reported = [
            None
            if wanted is None
            else LogProbabilities(
                row[2], tuple(zip(map(int, row[3:]), row[3 + count :], strict=False))[:wanted]
            )
            for row, wanted in zip(rows, asked, strict=True)
        ]
        return [int(row[1]) for row in rows], reported

    def _parts(self, group: list[Sequence], vocab: int, *, greedy: bool) -> dict[str, Tensor]:
        """What the device needs for this step, on the host."""
        changes, parts = Changes(vocab), {}
        for row, each in enumerate(group):
            if each.seen or each.counts or each.sampling.logit_bias:
                changes.add(row, each.sampling, each.counts or {}, each.seen or ())
        parts = changes.parts()
        if not greedy:
            drawn = draw([each.key for each in group], [each.written for each in group])
            parts["numbers"] = torch.from_numpy(drawn)
        bound = [row for row, each in enumerate(group) if each.constraint is not None]
        if bound:
            hidden = np.empty((len(bound), vocab), np.uint8)
            for place, row in enumerate(bound):
                constraint = group[row].constraint
                assert constraint is not None
                np.logical_not(constraint.allowed(vocab), out=hidden[place].view(np.bool_))
            parts["bound"], parts["hidden"] = torch.tensor(bound), torch.from_numpy(hidden)
        early = [row for row, each in enumerate(group) if not each.may_stop]
        if early and self._stops:
            parts["early"] = torch.tensor(
                [row * vocab + stop for row in early for stop in self._stops]
            )
        if any(each.sampling.tempered_logprobs for each in group):
            warm = [
                each.sampling.temperature if each.sampling.tempered_logprobs else 1.0
                for each in group
            ]
            parts["warm"] = torch.tensor(warm, dtype=torch.float64)
        return parts

    def _allowed(self, logits: Tensor, sent: dict[str, Tensor]) -> Tensor:
        """A copy of the logits with penalties and biases, and −inf for tokens that must not be
        chosen.
        """
        allowed = logits.index_fill(-1, self._forbidden, -torch.inf)
        change(allowed, sent)
        if "bound" in sent:
            hidden = sent["hidden"].view(torch.bool)
            allowed[sent["bound"]] = allowed[sent["bound"]].masked_fill(hidden, -torch.inf)
        if "early" in sent:
            allowed.view(-1).index_fill_(0, sent["early"], -torch.inf)
        return allowed

    def _sampler(self, group: list[Sequence]) -> Sampler:
        numbers = tuple(each.number for each in group)
        if self._samplers is None or self._samplers[0] != numbers:
            self._samplers = numbers, Sampler([each.sampling for each in group], self._device)
        return self._samplers[1]
