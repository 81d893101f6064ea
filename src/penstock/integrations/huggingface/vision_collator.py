"""A collator for multimodal processors of Hugging Face: their batches, with labels and loss
weights.

```python
collate = VisionCollator(processor, mask_history=True)
arguments = TrainingArguments("out", remove_unused_columns=False)     # or the Trainer removes the messages
Trainer(model, arguments, data_collator=collate, train_dataset=examples).train()      # examples: {"messages": […]}
```

Conversations with images become rows as in `penstock prepare`, by the same code and the same
settings of masks and images (`vision_batches`): the tokens are the processor's own, id for id. For
video, audio, arrays of pixels, and processors that cannot be asked for one image, the processor
makes the batch, and `vision_examples` transfers the weights to its tokens. A conversation that
fails a check is an error. Guarantees: `train`, `weight` and ranges of messages apply. Padding on
either side is recognised by the attention mask, so an end-of-text token that is also the padding id
stays trained. Tokens of images, audio and video are never trained. A user's text never becomes a
control token.

With role boundaries, or with your own `prepare`, rows are labelled by scanning their ids instead.
That supports fewer settings, and cannot distinguish what the prompt supplies from what the model
writes. Cost: a few milliseconds per row.
"""  # noqa: E501

import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, final

import numpy as np
import torch

from penstock.chat.encoded_chat import EncodedChat
from penstock.chat.encoder import ChatEncoder
from penstock.chat.masks.authors import INPUT_ROLES
from penstock.chat.masks.boundaries import Boundary, ResolvedBoundary, resolve
from penstock.chat.masks.families import Family, detect_family, family
from penstock.chat.masks.mask_settings import MaskSettings
from penstock.chat.masks.scanning import scan
from penstock.chat.records.conversation import Conversation
from penstock.chat.records.layout_settings import resolve_roles
from penstock.chat.render.template import Template
from penstock.core.arrays import Array, Bool, Float32
from penstock.core.errors import ConfigError, RecordError
from penstock.core.properties import cached_property
from penstock.integrations.huggingface.vision_batches import ImageBatches
from penstock.integrations.huggingface.vision_examples import (
    RowWeigher,
    media_ids,
    own_tokenizer,
    read_example,
    refuse_fields,
    refuse_message_weights,
    shared_variables,
)
from penstock.media.images import ImageSettings
from penstock.plan.inputs import IGNORE
from penstock.tokenizers import Tokenizer

Batch = dict[str, Any]
Weights = Float32

_log = logging.getLogger("penstock.huggingface")
_SCANNED = ("roles_to_train", "train_on_eos", "train_on_inputs")
"""Settings that role boundaries support."""
_APPEND = "append_terminator"
"""Key that marks a last message after which the template writes EOS."""


@final
class VisionCollator:
    """Makes batches of examples, with `labels` (unshifted, −100: not trained) and `loss_weights`
    (float32, same shape).

    Args:
        processor: A processor of transformers, with a tokenizer.
        boundaries: Label by role boundaries: the name of a family, a family, or declared
            boundaries. None: by the processor's template.
        template_arguments: Variables for the template (`enable_thinking`), and its `tools`.
        masked_ids: More ids that are never trained.
        on_empty: What to do with a row in which nothing is trained: "error" or "warn".
        reads_loss_weights: Whether your loss reads `loss_weights`. Labels cannot express 0.5, so
            weights other than 0 and 1 are refused unless it does.
        image_settings: Which images are accepted, and how they become RGB; paths begin at its
            `image_folder`.
        prepare: Makes a batch from examples; it is labelled by role boundaries. None: use
            `processor.apply_chat_template` on their messages.
        settings: What is trained: those of `penstock.chat.MaskSettings`, such as mask_history. By
            role boundaries only roles_to_train, train_on_eos and train_on_inputs, and
            on_missing_terminator "error" or "allow".

    Raises:
        ConfigError: A setting is unknown, out of range, or not supported by role boundaries; no
            family fits the template, or the boundaries do not fit the tokenizer; or the bytes of
            the tokenizer's tokens are unknown.
    """

    def __init__(
        self,
        processor: Any,
        boundaries: str | Family | Iterable[Boundary] | None = None,
        *,
        template_arguments: Mapping[str, object] | None = None,
        masked_ids: Collection[int] = (),
        on_empty: Literal["error", "warn"] = "error",
        reads_loss_weights: bool = False,
        image_settings: ImageSettings | None = None,
        prepare: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None,
        **settings: object,
    ) -> None:
        if on_empty not in ("error", "warn"):
            raise ConfigError(f"on_empty is {on_empty!r}; expected: error or warn")
        if not isinstance(template_arguments, Mapping | None):
            raise ConfigError(
                f"template_arguments is {template_arguments!r:.60}; expected: a mapping of "
                "variables"
            )
        self.processor, self.mask_settings = (
            processor,
            MaskSettings.of(settings, "; the template's go into template_arguments={…}"),
        )
        self._arguments = dict(template_arguments or {})
        self._on_empty, self._reads_weights, self._prepare = on_empty, reads_loss_weights, prepare
        self._given = boundaries
        self._tokenizer = own_tokenizer(processor.tokenizer)
        self._scans = boundaries is not None or prepare is not None
        found = self._family
        family_media = found.media_ids(self._tokenizer) if found else ()
        self.masked_ids = tuple(sorted({*family_media, *media_ids(processor), *masked_ids}))
        if self._scans:
            self._check_scanned()
            # Fails now if a role has no boundary.
            scan(
                [],
                self.boundaries,
                self.mask_settings.roles_to_train,
                self.mask_settings.train_on_eos,
            )
        elif self.mask_settings.on_rewrite == "split":
            raise ConfigError(
                "on_rewrite is split, which makes several rows of one example; choose report "
                "or error"
            )
        else:
            self.mask_settings = replace(
                self.mask_settings,
                roles_to_train=resolve_roles(self.mask_settings.roles_to_train, {}),
            )
            self._encoder, self._weigher = self._open_encoder()
            self._images = _image_batches(processor, image_settings)
            if self._images is not None:
                self._image_encoder = ChatEncoder(
                    self._encoder.tokenizer,
                    self._encoder.template,
                    self.mask_settings,
                    processor=self._images.processor,
                )
        _log.info("vision collator: ids that are never trained: %s", list(self.masked_ids))

    def __call__(self, examples: Sequence[Any]) -> Batch:
        """The processor's batch for `examples`, labelled; an example has `messages`, or is a list
        of messages.

        Raises:
            RecordError: An example has no messages, or fails a check; names its row.
        """
        if self._prepare is not None:
            return self.label(self._prepare(examples))
        tools = self._arguments.get("tools")
        conversations = [
            read_example(one, f"row {row} of the batch", tools) for row, one in enumerate(examples)
        ]
        if not self._scans and self._images is not None and self._images.reads(conversations):
            return self._with_images(self._images, conversations)
        refuse_fields(conversations)
        if self._scans:
            refuse_message_weights(conversations)
            return self.label(self._apply_template(conversations, [False] * len(conversations)))
        chats = [chats[0] for chats in self._encoder.encode_batch(conversations)]
        for row, chat in enumerate(chats):
            self._check_certificate(row, chat)
        appended = [
            bool(len(chat.ends)) and int(chat.begins[-1]) == len(chat.text) for chat in chats
        ]
        batch = self._apply_template(conversations, appended)
        ids, real = self._rows(batch)
        weights = np.zeros(ids.shape, np.float32)
        for row, chat in enumerate(chats):
            tokens = ids[row][real[row]].astype(np.int64)
            text_ids = chat.tokens.astype(np.int64)
            weights[row, real[row]] = self._weigher.weigh(
                tokens, text_ids, chat.loss_weights, f"row {row} of the batch"
            )
        return self._finish(batch, weights)

    def _with_images(self, images: ImageBatches, conversations: Sequence[Conversation]) -> Batch:
        """A batch of conversations whose media are all images."""
        placed = [images.place(one) for one in conversations]
        chats = [chats[0] for chats in self._image_encoder.encode_batch(placed)]
        for row, chat in enumerate(chats):
            self._check_certificate(row, chat)
        return self._finish(*images.batch(chats))

    def label(self, batch: Mapping[str, object]) -> Batch:
        """Label a processor's batch (input_ids and attention_mask, [rows, n]) by role boundaries.

        Raises:
            ConfigError: The batch has no attention mask, or role boundaries do not support a
                setting.
            RecordError: Nothing is trained in a row, or its last trained turn does not end.
        """
        self._check_scanned()
        ids, real = self._rows(batch)
        mask_settings = self.mask_settings
        weights: Weights = scan(
            ids,
            self.boundaries,
            mask_settings.roles_to_train,
            mask_settings.train_on_eos,
            mask_settings.train_on_inputs,
            attention_mask=real,
        )
        if (
            mask_settings.train_on_eos == "turn"
            and mask_settings.on_missing_terminator == "error"
            and not mask_settings.train_on_inputs
        ):
            without = scan(
                ids, self.boundaries, mask_settings.roles_to_train, "none", attention_mask=real
            )
            self._check_ends(ids, weights, weights != without)
        return self._finish(batch, weights)

    @cached_property
    def boundaries(self) -> tuple[ResolvedBoundary, ...]:
        """Role boundaries as ids: those that were given, or those of the template's family.

        Raises:
            ConfigError: There are none, or they do not fit the tokenizer.
        """
        if self._family is not None:
            return self._family.resolve(self._tokenizer)
        if self._given is None:
            raise ConfigError(
                "the chat template of the processor belongs to no known family; give "
                "boundaries: the name of a family, or a list of penstock.chat.Boundary"
            )
        assert not isinstance(self._given, str | Family)
        declared = resolve(self._given, self._tokenizer)
        if not declared:
            raise ConfigError(
                "boundaries are an empty list, so nothing would be trained; declare some, or "
                "leave them out"
            )
        return declared

    @cached_property
    def _family(self) -> Family | None:
        if isinstance(self._given, str):
            return family(self._given)
        if self._given is not None:
            return self._given if isinstance(self._given, Family) else None
        source = self._source
        return detect_family(source) if isinstance(source, str) else None

    @property
    def _source(self) -> Any:
        """The text of the template."""
        source = getattr(self.processor, "chat_template", None) or getattr(
            self.processor.tokenizer, "chat_template", ""
        )
        return source.get("default") if isinstance(source, Mapping) else source

    def _open_encoder(self) -> tuple[ChatEncoder, RowWeigher]:
        if not isinstance(self._source, str) or not self._source:
            raise ConfigError(
                "the processor has no chat template; set processor.chat_template, or give prepare"
            )
        if not isinstance(self._tokenizer, Tokenizer):
            raise ConfigError(
                f"{type(self.processor.tokenizer).__name__}: the tokens of this tokenizer "
                "cannot be traced to bytes; give role boundaries: the name of a family, or a "
                "list of penstock.chat.Boundary"
            )
        special = _special_tokens(self.processor.tokenizer)
        variables = {name: value for name, value in self._arguments.items() if name != "tools"}
        template = Template(
            source=self._source, name="of the processor", variables=special | variables
        )
        encoder = ChatEncoder(self._tokenizer, template, self.mask_settings, takes_media=True)
        return encoder, RowWeigher(self._tokenizer, self.masked_ids)

    def _check_scanned(self) -> None:
        """Refuse settings that role boundaries do not support."""
        usual = replace(
            MaskSettings(), **{name: getattr(self.mask_settings, name) for name in _SCANNED}
        )
        if self.mask_settings.on_missing_terminator == "allow":
            usual = replace(usual, on_missing_terminator="allow")
        for one in fields(MaskSettings):
            if getattr(self.mask_settings, one.name) != getattr(usual, one.name):
                raise ConfigError(
                    f"{one.name} is {getattr(self.mask_settings, one.name)!r}, which role "
                    "boundaries over token ids do not support; leave it out, or leave "
                    "boundaries and prepare out, so that rows are labelled by the "
                    "processor's template"
                )

    def _apply_template(
        self, conversations: Sequence[Conversation], appended: Sequence[bool]
    ) -> Mapping[str, Any]:
        """The processor's batch, with EOS after the last message of each conversation in
        `appended`.
        """
        messages = [
            [dict(message) for message in conversation.messages] for conversation in conversations
        ]
        arguments = {
            "add_generation_prompt": False,
            **self._arguments,
            **shared_variables(conversations),
        }
        if any(appended):
            for conversation, add in zip(messages, appended, strict=True):
                conversation[-1][_APPEND] = add
            eos = json.dumps(self.processor.tokenizer.eos_token)
            arguments["chat_template"] = (
                f"{self._source}{{% if messages[-1].{_APPEND} %}}{{{{ {eos} }}}}{{% endif %}}"
            )
        if not self.mask_settings.allow_forged:
            can_sanitize = (
                "sanitize_control_tokens"
                in inspect.signature(self.processor.apply_chat_template).parameters
            )
            if can_sanitize and self.mask_settings.trained_control_text != "as_control_tokens":
                arguments["sanitize_control_tokens"] = True
            else:
                self._refuse_control_text(conversations)
        batch: Mapping[str, Any] = self.processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
            **arguments,
        )
        return batch

    def _refuse_control_text(self, conversations: Sequence[Conversation]) -> None:
        """Refuse text that spells control tokens: the processor would encode it so, and a user
        could forge a turn.
        """
        controls = [*self.processor.tokenizer.all_special_tokens]
        as_tokens = self.mask_settings.trained_control_text == "as_control_tokens"
        for row, conversation in enumerate(conversations):
            for number, message in enumerate(conversation.messages):
                if as_tokens and message["role"] not in INPUT_ROLES:
                    continue
                text = json.dumps(message.get("content"), ensure_ascii=False, default=str)
                found = next((control for control in controls if control in text), None)
                if found is not None:
                    raise RecordError(
                        f"row {row} of the batch, message {number}: its text holds {found}, "
                        "which the processor would encode as a control token; clean the text"
                        + (
                            ""
                            if as_tokens
                            else ", or update transformers to 5.23, which can keep it as text"
                        )
                    )

    def _rows(self, batch: Mapping[str, object]) -> tuple[Array, Bool]:
        """Ids, and which of them are not padding, both [rows, n]."""
        if "attention_mask" not in batch:
            raise ConfigError(
                "the batch has no attention_mask, which is needed to tell padding from a real "
                "end of text; let the processor return it (return_attention_mask=True)"
            )
        ids = torch.as_tensor(batch["input_ids"]).cpu().numpy()
        return ids, torch.as_tensor(batch["attention_mask"]).cpu().numpy() != 0

    def _finish(self, batch: Mapping[str, object], weights: Weights) -> Batch:
        """The batch with its labels and loss weights, which are 0 for media."""
        ids = torch.as_tensor(batch["input_ids"])
        weights[np.isin(ids.cpu().numpy(), self.masked_ids)] = 0.0
        if "mm_token_type_ids" in batch:
            # Some processors also mark the tokens that stand for media.
            weights[torch.as_tensor(batch["mm_token_type_ids"]).cpu().numpy() != 0] = 0.0
        self._check_rows(ids, weights)
        loss_weights = torch.from_numpy(weights).to(ids.device)
        labels = ids.to(torch.int64).masked_fill(loss_weights == 0, IGNORE)
        return {**batch, "labels": labels, "loss_weights": loss_weights}

    def _check_certificate(self, row: int, chat: EncodedChat) -> None:
        problems = [
            one
            for one in chat.certificate.problems
            if one.is_error and one.kind != "nothing_trained"
        ]
        if problems:
            raise RecordError(f"row {row} of the batch: {'; '.join(map(str, problems))}")

    def _check_ends(self, ids: Array, weights: Weights, ends: Array) -> None:
        """Check that the last trained token of each row ends its turn."""
        for row in np.flatnonzero(weights.any(axis=1)).tolist():
            last = int(np.flatnonzero(weights[row])[-1])
            if not ends[row, last]:
                text = self.processor.tokenizer.decode(
                    ids[row, max(last - 8, 0) : last + 1].tolist()
                )
                raise RecordError(
                    f"row {row} of the batch: its last trained turn has no terminator (it ends "
                    f"{text!r}), so the model "
                    "would not learn to stop; let the template write one, or "
                    'on_missing_terminator="allow"'
                )

    def _check_rows(self, ids: torch.Tensor, weights: Weights) -> None:
        if not self._reads_weights and not np.isin(weights, (0, 1)).all():
            row = int(np.flatnonzero(~np.isin(weights, (0, 1)).all(axis=1))[0])
            raise ConfigError(
                f"row {row} of the batch has loss weights other than 0 and 1, which labels "
                f"cannot express; let your "
                'loss read batch["loss_weights"] (penstock.huggingface.weighted_loss) and set '
                "reads_loss_weights=True"
            )
        for row in np.flatnonzero(~weights.any(axis=1)).tolist():
            begin = self.processor.tokenizer.decode(ids[row].tolist())[:80]
            message = (
                f"row {row} of the batch: nothing is trained in its {ids.shape[1]} tokens, "
                f"which begin {begin!r}; expected: a turn of "
                f"{', '.join(self.mask_settings.roles_to_train) or 'some role'}; correct the "
                "settings, or drop the example"
            )
            if self._on_empty == "error":
                raise RecordError(message + "; on_empty='warn' only warns")
            _log.warning(message)


def _special_tokens(tokenizer: object) -> dict[str, str]:
    """Texts of special tokens by the names that templates use, such as bos_token."""
    named = getattr(tokenizer, "special_tokens_map", {})
    return {
        name: str(text) for name, text in named.items() if not isinstance(text, list | tuple | dict)
    }


def _image_batches(processor: object, settings: ImageSettings | None) -> ImageBatches | None:
    """What makes batches with images; None: this processor makes its batches itself.

    Raises:
        ConfigError: There are settings of images, and this processor makes its batches itself.
    """
    try:
        return ImageBatches(processor, settings or ImageSettings())
    except ConfigError as error:
        if settings is not None:
            raise ConfigError(
                f"image_settings: {error}; so the processor makes its batches itself"
            ) from error
        _log.info("the processor makes the batches itself: %s", error)
        return None
