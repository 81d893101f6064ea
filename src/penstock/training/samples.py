"""Texts that the model writes while it is trained: what a loss does not tell."""

from collections.abc import Callable, Sequence
from typing import Any, final

from penstock.errors import ConfigError
from penstock.generation import Engine, Sampling, begin_ids, end_ids
from penstock.models import LanguageModel
from penstock.shards import ChatInfo
from penstock.tokenizers import Tokenizer
from penstock.training.settings import EvaluatorSettings


def shipped(name: str, datasets: Sequence[Any], cannot: str) -> tuple[Tokenizer, list[ChatInfo], tuple[int, ...]]:
    """What datasets ship for writing: the first one's tokenizer, how chats were made, and the ids that end a text.

    Args:
        name: Of the evaluator, for errors.
        datasets: What is trained on.
        cannot: What is impossible without a tokenizer, for errors.

    Raises:
        ConfigError: The first ships no tokenizer.
    """
    tokenizer = getattr(datasets[0], "loaded_tokenizer", None)
    if tokenizer is None:
        raise ConfigError(f"evaluator {name!r}: the first source ships no tokenizer, so {cannot}")
    chats = [dataset.chat for dataset in datasets if getattr(dataset, "chat", None) is not None]
    return tokenizer, chats, end_ids(tokenizer, (stop for chat in chats for stop in chat.stop_ids))


@final
class Samples:
    """One text for each prompt, with the same seeds each time.

    Args:
        name: Of the evaluator, for errors.
        settings: Prompts and how tokens are chosen.
        datasets: What is trained on; the first ships the tokenizer.
        sequence_length: Tokens of a text at most, its prompt among them.
        model: That will write.

    Raises:
        ConfigError: There is no tokenizer, the model cannot write, or a prompt fills a whole row.
    """

    def __init__(
        self,
        name: str,
        settings: EvaluatorSettings,
        datasets: Sequence[Any],
        sequence_length: int,
        model: LanguageModel,
    ) -> None:
        tokenizer, _, self._stop_ids = shipped(name, datasets, "nothing can be written")
        self._tokenizer, self._settings = tokenizer, settings
        self._length = sequence_length
        bos = begin_ids(tokenizer)
        self._prompts = [[*bos, *tokenizer.encode(text).tolist()] for text in settings.prompts]
        # Now rather than after hours of training.
        model.new_cache(1, 2)
        for text, ids in zip(settings.prompts, self._prompts, strict=True):
            if not 0 < len(ids) < self._length:
                raise ConfigError(
                    f"evaluator {name!r}: prompt {text[:40]!r} has {len(ids)} tokens; a text needs 1 to "
                    f"{self._length - 1} to begin with"
                )

    def __call__(self, model: LanguageModel, stop: Callable[[], bool]) -> dict[str, Any]:
        """The texts by prompt number: prompt and what was written; a second or two, whether to stop or not."""
        engine = Engine(model, self._tokenizer, context_length=self._length, stop_ids=self._stop_ids)
        sampling = Sampling(temperature=self._settings.temperature, max_tokens=self._settings.max_tokens, min_tokens=1)
        written = engine.generate_all(self._prompts, sampling)
        texts = zip(self._settings.prompts, written, strict=True)
        return {str(number): prompt + one.text for number, (prompt, one) in enumerate(texts)}
