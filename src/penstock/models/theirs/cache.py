"""transformers' own caches, for models that keep more of a text than our cache of keys and values
can.

Recurrent and convolution states, windows that differ by layer, attention that ours does not fit:
such a model is asked to keep its own cache for each sequence, one sequence at a time. Not every
model's own cache is right, so a trial comes first: single steps after a prompt, and a prompt in
parts, must give the logits of the whole text. The tokens of a sequence remain the reference
(`TextCache`): what a cache cannot do, such as going back, is done by reading them again.
"""

import inspect
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from penstock.models.isolation.lengths import changing_lengths
from penstock.models.text_cache import ReadText, TextCache
from penstock.models.theirs.attention import PROMPT, distance, one_line, rounding, trial_tokens
from penstock.models.theirs.interface import TheirModel
from penstock.models.without_dropout import evaluating

_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""What models call their cache, as an argument and in their outputs; what comes first is newer
(`cache`: from 5.24).
"""


@final
class TheirCaches:
    """What a model's own caches can do, found by a trial.

    Attributes:
        steps: Whether single tokens after a prompt are exact.
        parts: Whether a prompt may be read in parts.
        reason: Why steps are not exact; empty if they are.
    """

    def __init__(self, model: TheirModel) -> None:
        self._model = model
        self._counts = "position_ids" in inspect.signature(model.inner.forward).parameters
        self.steps, self.parts, self.reason = False, False, ""
        # The trial's short text shows nothing of what a longer one meets: the first to get there is
        # read twice.
        self._watched = {length + more for length in changing_lengths(model) for more in (1, 2)}
        trial = model.trial_model
        if trial is model:
            self._try()
        else:
            found = TheirCaches(trial)
            self.steps, self.parts, self.reason = found.steps, found.parts, found.reason

    def _try(self) -> None:
        tokens = trial_tokens(self._model.inner)
        count = len(tokens)
        with evaluating(self._model.inner):
            try:
                truth = self._model.logits(
                    self._model.read({"input_ids": tokens[None], "use_cache": False})[0]
                )[0]
                self.steps = self._exact(tokens, truth, [0, *range(PROMPT, count + 1)])
                self.reason = ""
                self.parts = self.steps and self._exact(tokens, truth, [0, 4, 5, PROMPT, count])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.reason = one_line(error)

    def _exact(self, tokens: Tensor, truth: Tensor, cuts: list[int]) -> bool:
        held, found = ReadText(0, {}), []
        for begin, end in pairwise(cuts):
            found.append(self._extend(held, tokens[begin:end]))
        far = distance(torch.stack(found), truth[torch.tensor(cuts[1:]) - 1])
        if far <= rounding(self._model):
            return True
        self.reason = f"steps through its own cache are {far:.2g} standard deviations off"
        return False

    def _extend(self, held: ReadText, tokens: Tensor) -> Tensor:
        """Read more tokens [n]; logits [vocab] after the last."""
        given = {"input_ids": tokens[None], "use_cache": True, **held.cache}
        if self._counts:
            # Hybrids that ask their first layer for a text's length (Bamba, MiniMax) would begin at
            # 0 again.
            given["position_ids"] = (
                held.count + torch.arange(len(tokens), device=tokens.device)[None]
            )
        hidden, output = self._model.read(given)
        name = next((name for name in _NAMES if getattr(output, name, None) is not None), None)
        if name is None:
            raise ValueError("it returns no cache")
        held.cache = {name: getattr(output, name)}
        held.count += len(tokens)
        return self._model.logits(hidden[0, -1])

    def logits(self, texts: TextCache, sequence: int) -> Tensor:
        """[vocab] after the last token of a sequence, whose cache reads what it lacks."""
        text = texts.text(sequence)
        states = texts.states.setdefault(sequence, [])
        held = self._begin(states, len(text))
        begin = held.count
        if len(text) - begin > 1:
            # The same prompt may be asked for again, and then lacks only its last token.
            self._extend(held, text[begin:-1])
            states[:] = [held.copy(kept=True)]
        found = self._extend(held, text[-1:])
        states.append(held)
        passed = {length for length in self._watched if begin < length <= len(text)}
        if passed:
            self._watched -= passed
            self._compare(text, found)
        if not self.steps:
            states.clear()
            return self._model.logits(
                self._model.read({"input_ids": text[None], "use_cache": False})[0][0, -1]
            )
        return found

    def _begin(self, states: list[ReadText], count: int) -> ReadText:
        """The cache to go on from, taken out of `states` unless it is to stay."""
        states[:] = [state for state in states if state.count < count]
        if not states or (count - states[-1].count > 1 and not self.parts):
            states.clear()
            return ReadText(0, {})
        return states[-1].copy() if states[-1].kept else states.pop()

    def _compare(self, text: Tensor, found: Tensor) -> None:
        """Stop using caches if they are wrong for a text of this length."""
        truth = self._model.logits(
            self._model.read({"input_ids": text[None], "use_cache": False})[0][0, -1]
        )
        far = distance(found, truth)
        if not far <= rounding(self._model):
            self.steps = self.parts = False
            self.reason = (
                f"after {len(text)} tokens its own cache is {far:.2g} standard deviations off"
            )
