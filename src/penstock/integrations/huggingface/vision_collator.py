"""A collator for multimodal processors of Hugging Face: their batches, with labels and loss weights by role boundaries.

```python
collate = VisionCollator(processor, "qwen2_vl")
Trainer(model, data_collator=collate, train_dataset=examples, …)      # examples: {"messages": […]}
```

A processor turns one image into many tokens, so where a message lies is known only from the ids that it returns. They
are scanned for the turns of the family, or for declared boundaries. Guarantees: padding is told by the attention mask,
on either side, so that an end of text that is also the padding id stays trained; tokens of images, audio and video are
never trained; text of a message is no control token; a row in which nothing is trained is an error. Costs: some
microseconds a row beside the processor's own work.
"""

import inspect
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
import torch

from penstock.chat.boundaries import Boundary, ResolvedBoundary, resolve
from penstock.chat.families import Family, detect_family, family, token_id
from penstock.chat.scanning import TrainOnEos, scan
from penstock.errors import ConfigError, RecordError, TokenizerError
from penstock.inputs import IGNORE
from penstock.tokenizers import Tokenizer

Batch = dict[str, Any]

_log = logging.getLogger("penstock.huggingface")
_MEDIA = re.compile(r"(.*_)?(image|img|video|audio|boi|eoi|boa|eoa)(_.*)?_(token|ids)(_ids?)?|image_ids")
"""Names of a processor's attributes that hold a media token, or its id."""


@final
class VisionCollator:
    """Examples to batches with `labels` (unshifted, −100 where not trained) and `loss_weights` (float32, beside them).

    Args:
        processor: Of transformers, with a tokenizer.
        boundaries: Name of a family, a family, or declared boundaries; None: the family of the processor's template.
        roles_to_train: None: the assistant.
        train_on_eos: Which ends of turns are trained: "turn", "all", "last" or "none".
        train_on_inputs: Train everything but padding and media.
        masked_ids: More ids that are never trained.
        on_empty: What to do with a row in which nothing is trained: "error", or "warn".
        prepare: Makes a batch of examples; None: `processor.apply_chat_template` on their `messages`.
        template_arguments: For `apply_chat_template`, such as tools.

    Raises:
        ConfigError: No family fits the template, or the boundaries do not fit the tokenizer.
    """

    def __init__(
        self,
        processor: Any,
        boundaries: str | Family | Iterable[Boundary] | None = None,
        *,
        roles_to_train: Collection[str] | None = None,
        train_on_eos: TrainOnEos = "turn",
        train_on_inputs: bool = False,
        masked_ids: Collection[int] = (),
        on_empty: Literal["error", "warn"] = "error",
        prepare: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> None:
        if on_empty not in ("error", "warn"):
            raise ConfigError(f"on_empty is {on_empty!r}; due: error or warn")
        self.processor = processor
        self._tokenizer = own_tokenizer(processor.tokenizer)
        self.boundaries, media = self._resolve(boundaries)
        self.masked_ids = tuple(sorted({*media, *media_ids(processor), *masked_ids}))
        self._roles = roles_to_train
        self._knobs: dict[str, Any] = {"train_on_eos": train_on_eos, "train_on_inputs": train_on_inputs}
        self._on_empty, self._prepare = on_empty, prepare
        self._arguments = {"add_generation_prompt": False, **template_arguments}
        scan([], self.boundaries, self._roles, **self._knobs)
        _log.info("vision collator: ids that are never trained: %s", list(self.masked_ids))

    def __call__(self, examples: Sequence[Any]) -> Batch:
        """A batch of the processor for `examples`, labelled; an example has `messages`, or is a list of messages."""
        return self.label(self._prepare(examples) if self._prepare else self._apply_template(examples))

    def label(self, batch: Mapping[str, Any]) -> Batch:
        """`batch`, as a processor returned it (input_ids and attention_mask, [rows, n]), with labels and loss weights.

        Raises:
            ConfigError: The batch has no attention mask.
            RecordError: Nothing is trained in a row.
        """
        if "attention_mask" not in batch:
            raise ConfigError(
                "the batch has no attention_mask, without which padding cannot be told from a real end of text; let "
                "the processor return it (return_attention_mask=True)"
            )
        ids = torch.as_tensor(batch["input_ids"])
        real = torch.as_tensor(batch["attention_mask"])
        if "mm_token_type_ids" in batch:
            # Some processors also say themselves which tokens stand for media.
            hidden = torch.as_tensor(batch["mm_token_type_ids"]).cpu().numpy() != 0
        else:
            hidden = np.zeros(tuple(ids.shape), np.bool_)
        weights = scan(
            ids.cpu().numpy(),
            self.boundaries,
            self._roles,
            attention_mask=real.cpu().numpy(),
            masked_ids=self.masked_ids,
            **self._knobs,
        )
        weights[hidden] = 0.0
        self._check_rows(ids, weights)
        loss_weights = torch.from_numpy(weights).to(ids.device)
        labels = ids.to(torch.int64).masked_fill(loss_weights == 0, IGNORE)
        return {**batch, "labels": labels, "loss_weights": loss_weights}

    def _resolve(
        self, given: str | Family | Iterable[Boundary] | None
    ) -> tuple[tuple[ResolvedBoundary, ...], tuple[int, ...]]:
        """Boundaries as ids, and the media ids of the family."""
        if given is None:
            source = getattr(self.processor, "chat_template", None) or self.processor.tokenizer.chat_template
            given = detect_family(source) if isinstance(source, str) else None
            if given is None:
                raise ConfigError(
                    "the chat template of the processor is of no family that we know; give boundaries: the name of a "
                    "family, or a list of penstock.chat.Boundary"
                )
            _log.info("vision collator: the template is of the family %s (%s)", given.name, given.title)
        chosen = family(given) if isinstance(given, str) else given
        if isinstance(chosen, Family):
            return chosen.resolve(self._tokenizer), chosen.media_ids(self._tokenizer)
        declared = resolve(chosen, self._tokenizer)
        if not declared:
            raise ConfigError(
                "boundaries are an empty list, so nothing would be trained; declare some, or leave them out"
            )
        return declared, ()

    def _apply_template(self, examples: Sequence[Any]) -> Mapping[str, Any]:
        conversations = [example["messages"] if isinstance(example, Mapping) else example for example in examples]
        arguments = dict(self._arguments)
        if "sanitize_control_tokens" in inspect.signature(self.processor.apply_chat_template).parameters:
            arguments.setdefault("sanitize_control_tokens", True)
        else:
            self._refuse_control_text(conversations)
        batch: Mapping[str, Any] = self.processor.apply_chat_template(
            conversations,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
            **arguments,
        )
        return batch

    def _refuse_control_text(self, conversations: Sequence[Any]) -> None:
        """This processor would make control tokens of text that spells them: a user could forge a turn."""
        controls = [*self.processor.tokenizer.all_special_tokens]
        for row, conversation in enumerate(conversations):
            for number, message in enumerate(conversation):
                text = json.dumps(message.get("content"), ensure_ascii=False, default=str)
                found = next((control for control in controls if control in text), None)
                if found is not None:
                    raise RecordError(
                        f"row {row} of the batch, message {number}: its text holds {found}, which this version of "
                        "transformers makes a control token of; update transformers to 5.23, or clean the text"
                    )

    def _check_rows(self, ids: torch.Tensor, weights: np.ndarray[Any, Any]) -> None:
        for row in np.flatnonzero(~weights.any(axis=1)):
            begin = self.processor.tokenizer.decode(ids[row].tolist())[:80]
            roles = ", ".join(self._roles if self._roles is not None else ["assistant"])
            message = (
                f"row {row} of the batch: nothing is trained in its {ids.shape[1]} tokens, which begin {begin!r}; due: "
                f"a turn of {roles or 'some role'} as the boundaries describe it (the logger penstock.chat shows "
                "them); correct them, or drop the example"
            )
            if self._on_empty == "error":
                raise RecordError(message + "; on_empty='warn' lets it pass")
            _log.warning(message)


def own_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer of transformers as one of penstock, which finds more forms of a marker; itself where that fails."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    names = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    files = {"tokenizer.json": json.dumps(content).encode(), "tokenizer_config.json": json.dumps(names).encode()}
    try:
        return Tokenizer(type(tokenizer).__name__, files)
    except TokenizerError as error:
        _log.info("markers are encoded by the tokenizer of transformers: %s", error)
        return tokenizer


def media_ids(processor: Any) -> tuple[int, ...]:
    """Ids of the image, audio and video tokens that a processor names; never that of the unknown token."""
    tokenizer, found = processor.tokenizer, set()
    for holder in (processor, tokenizer):
        for name, value in vars(holder).items():
            if not _MEDIA.fullmatch(name):
                continue
            for entry in value if isinstance(value, (list, tuple, set)) else [value]:
                found.add(token_id(entry, tokenizer) if isinstance(entry, str) else entry)
    unknown = getattr(tokenizer, "unk_token_id", None)
    return tuple(sorted(int(i) for i in found if isinstance(i, int) and not isinstance(i, bool) and i != unknown))
