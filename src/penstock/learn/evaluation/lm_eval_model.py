"""Our models as models of EleutherAI's lm-eval, so that all of its tasks run on them.

Guarantees: requests get the same answers, within rounding, as from lm-eval's own `hf` model with
the same weights, because texts become tokens in the same way; the tests compare both. These
differences are intended:

- embedding rows without a tokenizer id are left out of the softmax;
- generated text has no control tokens except those that end it;
- BOS is put where the model was trained with it: before a text, unless the text begins with a
  control token, as a rendered conversation does; and only once, while `hf` adds a second one when
  it scores a whole document;
- a text in `until` that is a control token ends the generated text as such, too;
- a generation setting that the model does not support is refused, not ignored; and a task can
  generate more than half of the context only if its prompt is shorter than the other half.

Costs: those of `Subject`, which packs short sequences into rows and runs prompts together;
lm-eval's batch size has no effect. Needs the extra `eval`.

lm-eval finds models of other packages only after they are imported: use `penstock eval RUN --task
lm-eval:NAME` or `run_lm_eval`, or pass an `LmEvalModel` to `lm_eval.simple_evaluate`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from penstock.chat import Template
from penstock.chat.render.traced_text import LITERAL
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.core.json_values import JsonMapping
from penstock.learn.evaluation.subject import Subject
from penstock.learn.generation import Sampling
from penstock.learn.generation.session import first_id

SCORED_AT_ONCE, WRITTEN_AT_ONCE = 1024, 128
"""Requests per update of the progress bar; after each, lm-eval's cache has their answers."""
MAX_TOKENS = 256
"""Default for the maximum of generated tokens, as in lm-eval's own models."""
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of that setting; the first one given counts, as in lm-eval."""
WITHOUT_SYSTEM = "the chat template refuses a system message, so it was left out"
"""The note on scores where it was."""
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "typical_p": 1.0, "length_penalty": 1.0}
"""Unsupported settings, with the value that has no effect."""

Pair = tuple[list[int], list[int]]
"""Tokens of a context, and of the continuation that is scored."""


@final
class LmEvalModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A `Subject` with lm-eval's interface.

    Attributes:
        notes: Remarks that readers of its scores must know.

    Args:
        subject: The model with its tokenizer, and its chat template if it has one.
        seed: Seed of the draws, for tasks with a temperature.
    """

    def __init__(self, subject: Subject, *, seed: int = 0) -> None:
        super().__init__()
        self.subject, self._seed = subject, seed
        self.notes: tuple[str, ...] = ()
        tokenizer = subject.tokenizer
        self._controls = frozenset(tokenizer.special_tokens.values())
        # A model may also spell its stop token in plain tokens; lm-eval's own models stop there
        # too.
        names = {token: text for text, token in tokenizer.special_tokens.items()}
        self._ends = tuple(names[token] for token in sorted(subject.stop_ids) if token in names)

    @property
    def eot_token_id(self) -> int | None:
        """EOS."""
        return self.subject.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, else EOS, as in lm-eval's own models; EOS
        too if the model was trained without the BOS that its tokenizer adds.

        Raises:
            ConfigError: There is neither.
        """
        tokenizer = self.subject.tokenizer
        found = first_id(tokenizer, self.subject.begin_ids)
        if found is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name} has neither BOS nor EOS, but a text without "
                "context needs one before it; use tasks that give a context"
            )
        return found

    @property
    def max_length(self) -> int:
        """Tokens in the model's context."""
        return self.subject.context_length

    @property
    def max_gen_toks(self) -> int:
        """Default for the maximum of generated tokens."""
        return MAX_TOKENS

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in lm-eval's stored requests."""
        tokenizer = self.subject.tokenizer
        return f"{tokenizer.name}-{tokenizer.fingerprint}".replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for lm-eval's records; None if it is not used."""
        template = self.subject.template
        return template.source if template is not None and chat_template is not False else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text, up to the place where the model continues. A system message
        that the template refuses is left out, as in lm-eval's own models, and noted.

        Args:
            chat_history: Role and content of each message.
            add_generation_prompt: Add the generation prompt; else continue the last message.

        Raises:
            ConfigError: The model has no chat template.
            ConversationError: The template does not write the last message.
            RecordError: The template refuses the conversation.
        """
        template = self.subject.template
        if template is None:
            raise ConfigError(
                "the model has no chat template; set chat to false to run the task as plain text"
            )
        try:
            return self._rendered(template, chat_history, add_generation_prompt)
        except RecordError:
            without = [one for one in chat_history if one["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            text = self._rendered(template, without, add_generation_prompt)
            self.notes = (WITHOUT_SYSTEM,)
            return text

    def _rendered(
        self, template: Template, chat_history: list[dict[str, str]], add_generation_prompt: bool
    ) -> str:
        if add_generation_prompt:
            return template.render_plain(chat_history, add_generation_prompt=True)
        rendered = template.render(chat_history)
        place = end = 0
        for length, message, field, *_ in rendered.runs:
            place += length
            if message != LITERAL and message == len(chat_history) - 1 and field == "content":
                end = place
        if not end:
            raise ConversationError(
                "the chat template does not write the content of the last message; give the "
                "message some content"
            )
        return rendered.text[:end]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Ids of a text. Control tokens in it are encoded as such, because rendered conversations
        come as text.

        Args:
            string: The text.
            add_special_tokens: Whether to put BOS before it, if the model was trained with BOS;
                None: unless the text begins with a control token.
        """
        ids: list[int] = self.subject.tokenizer.encode(string, allow_control=True).tolist()
        if add_special_tokens is None:
            add_special_tokens = not (ids and ids[0] in self._controls)
        return [*self.subject.begin_ids, *ids] if add_special_tokens else ids

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text, in windows of the model's context; each token counts
        once.
        """
        windows: list[Pair] = []
        owners: list[int] = []
        for owner, (text,) in enumerate(request.args for request in requests):
            for window in get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False),
                self.prefix_token_id,
                self.max_length,
                1,
            ):
                windows.append(make_disjoint_window(window))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(
            owners, self._scores(windows, disable_tqdm), strict=True
        ):
            totals[owner] += log_probability
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The model's text after each context, up to the task's stop texts.

        Raises:
            ConfigError: A task needs a setting that is not supported.
        """
        texts = [""] * len(requests)
        controls = self.subject.tokenizer.special_tokens
        progress = tqdm(total=len(requests), disable=disable_tqdm, desc="Writing")
        for sampling, members in _by_sampling(
            [request.args[1] for request in requests], self._ends, self._seed
        ):
            prompts = [
                self.tok_encode(requests[member].args[0]) or [self.prefix_token_id]
                for member in members
            ]
            ends = [controls[text] for text in sampling.stop if text in controls]
            for begin in range(0, len(members), WRITTEN_AT_ONCE):
                part = members[begin : begin + WRITTEN_AT_ONCE]
                # Each part gets its own seed, so that equal requests in two parts do not give equal
                # texts.
                drawn = replace(sampling, seed=sampling.seed + begin)
                written = self.subject.write(
                    prompts[begin : begin + WRITTEN_AT_ONCE], drawn, stop_ids=ends
                )
                for member, one in zip(part, written, strict=True):
                    texts[member] = one.text
                    self.cache_hook.add_partial("generate_until", requests[member].args, one.text)
                progress.update(len(part))
        progress.close()
        return texts

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it consists of the most likely
        tokens.
        """
        found = []
        scores = self._scores(
            [(context, continuation) for _, context, continuation in requests], disable_tqdm
        )
        for request, score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], score)
            found.append(score)
        return found

    def _scores(self, pairs: Sequence[Pair], disable_tqdm: bool) -> Iterator[tuple[float, bool]]:
        progress = tqdm(total=len(pairs), disable=disable_tqdm, desc="Scoring")
        for begin in range(0, len(pairs), SCORED_AT_ONCE):
            part = pairs[begin : begin + SCORED_AT_ONCE]
            for one in self.subject.log_likelihoods(part):
                yield one.log_probability, one.is_greedy
            progress.update(len(part))
        progress.close()


def sampling_of(settings: JsonMapping, ends: Sequence[str] = (), seed: int = 0) -> Sampling:
    """The sampling that a task asks for (its `generation_kwargs`).

    Args:
        settings: lm-eval's names. Without `do_sample`, a temperature above 0 draws; with
            `do_sample`, the default temperature is 1.
        ends: Further texts that end the generated text.
        seed: Seed of the draws.

    Raises:
        ConfigError: A setting is not supported and its value has an effect.
    """
    left = dict(settings)
    until = left.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    most = next(
        (value for name in _MAX_TOKENS if (value := left.get(name)) is not None), MAX_TOKENS
    )
    draws, temperature = left.pop("do_sample", None), left.pop("temperature", None)
    filters = {
        name: left.pop(name) for name in ("top_p", "top_k", "min_p") if left.get(name) is not None
    }
    if filters.get("top_k") == 0:
        # In transformers, 0 means all tokens.
        del filters["top_k"]
    unknown = {
        n: v
        for n, v in left.items()
        if n not in _MAX_TOKENS and v is not None and v != _NEUTRAL.get(n, ...)
    }
    if unknown:
        raise ConfigError(
            f"the task asks for generation with {unknown}, which is not supported; override it"
        )
    if draws is False:
        temperature = 0.0
    elif temperature is None:
        temperature = 1.0 if draws else 0.0
    return Sampling(
        temperature=float(temperature),
        max_tokens=int(most),
        stop=tuple(dict.fromkeys(text for text in (*stops, *ends) if text)),
        seed=seed,
        **filters,
    )


def _by_sampling(
    settings: Sequence[Mapping[str, object]], ends: Sequence[str], seed: int
) -> Iterator[tuple[Sampling, list[int]]]:
    """Places of the requests by their sampling, in order."""
    groups: dict[Sampling, list[int]] = {}
    for place, one in enumerate(settings):
        groups.setdefault(sampling_of(one, ends, seed), []).append(place)
    yield from groups.items()
