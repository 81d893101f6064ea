"""The next token of each sequence of a batch: which tokens are allowed, the draw, and the
log-probabilities to report.
"""

from collections.abc import Collection
from typing import final

import torch
from torch import Tensor

from penstock.learn.generation.sampling import Sampler, change, draw, log_probabilities
from penstock.learn.generation.sequence import Sequence
from penstock.learn.generation.settings import LogProbabilities


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
        self._forbidden, self._stops = (
            torch.tensor(sorted(ids), dtype=torch.int64, device=device)
            for ids in (forbidden, stops)
        )
        self._device = device
        self._samplers: tuple[tuple[int, ...], Sampler] | None = None

    def choose(
        self, group: list[Sequence], logits: Tensor
    ) -> tuple[list[int], list[LogProbabilities | None]]:
        """A token for each of B sequences, from logits [B, vocab]; and the log-probabilities of
        those that ask for them, an empty list if none does.
        """
        sampler = self._sampler(group)
        numbers = (
            None
            if sampler.greedy
            else draw([each.key for each in group], [each.written for each in group])
        )
        chosen = sampler.choose(self._allowed(group, logits), numbers)
        return chosen.tolist(), self._log_probabilities(group, logits, chosen)

    def _allowed(self, group: list[Sequence], logits: Tensor) -> Tensor:
        """A copy of the logits with penalties and biases, and −inf for tokens that must not be
        chosen.
        """
        allowed = logits.index_fill(-1, self._forbidden, -torch.inf)
        for row, each in enumerate(group):
            if each.seen or each.counts or each.sampling.logit_bias:
                change(allowed[row], each.sampling, each.counts or {}, each.seen or ())
            if each.constraint is not None:
                allowed[row].masked_fill_(
                    ~each.constraint.allowed(allowed.shape[1], allowed.device), -torch.inf
                )
        too_early = [row for row, each in enumerate(group) if not each.may_stop]
        if too_early and len(self._stops):
            allowed[
                torch.tensor(too_early, device=logits.device)[:, None], self._stops
            ] = -torch.inf
        return allowed

    def _sampler(self, group: list[Sequence]) -> Sampler:
        numbers = tuple(each.number for each in group)
        if self._samplers is None or self._samplers[0] != numbers:
            self._samplers = numbers, Sampler([each.sampling for each in group], self._device)
        return self._samplers[1]

    def _log_probabilities(
        self, group: list[Sequence], logits: Tensor, chosen: Tensor
    ) -> list[LogProbabilities | None]:
        """Log-probabilities of the rows that ask for them; empty if none does."""
        asked = [each.sampling.logprobs for each in group]
        if all(most is None for most in asked):
            return []
        most = max(each or 0 for each in asked)
        if any(each.sampling.tempered_logprobs for each in group):
            warm = [
                each.sampling.temperature if each.sampling.tempered_logprobs else 1.0
                for each in group
            ]
            logits = logits / torch.tensor(warm, dtype=logits.dtype, device=logits.device)[:, None]
        own, values, ids = (x.tolist() for x in log_probabilities(logits, chosen, most))
        return [
            None
            if count is None
            else LogProbabilities(own[row], tuple(zip(ids[row], values[row], strict=True))[:count])
            for row, count in enumerate(asked)
        ]
