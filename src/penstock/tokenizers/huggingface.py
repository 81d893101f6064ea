"""`tokenizer.json`: the format of the Hugging Face `tokenizers` package.

Text is encoded by a scrubbed copy of the file: control entries are gone from `added_tokens`, and
from whatever else could produce them (merges that spell one; pieces of a Unigram or word
vocabulary); BOS/EOS templates, truncation, padding and dropout are off. Both gigatoken and the
fallback read that copy. The original file is used only if control text is allowed.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, final

from penstock.core.errors import TokenizerError
from penstock.core.json_values import JsonObject
from penstock.core.large_json import canonical_json
from penstock.core.system import give_back_memory, without_collector
from penstock.tokenizers.byte_table import ByteTable
from penstock.tokenizers.encoder import encoder_of_texts, load_encoder
from penstock.tokenizers.fast import Encoder, FastEncoder, backend_from_json
from penstock.tokenizers.piece_encoder import fast_byte_level
from penstock.tokenizers.post_processors import before_a_text
from penstock.tokenizers.spelling import spell_byte_level, spell_sentencepiece
from penstock.tokenizers.steps import (
    adds_space,
    flatten,
    only_spaces,
    without_first_space,
)
from penstock.tokenizers.tokenizer_config import with_configured_entries
from penstock.tokenizers.vocabulary import (
    BEGIN_NAMES,
    END_NAMES,
    PAD_NAMES,
    AddedEntry,
    Positioned,
    is_content,
    named_control,
)
from penstock.tokenizers.written_merges import (
    WrittenMerges,
    dump_tokenizer_json,
    parse_tokenizer_json,
)
from penstock.tokenizers.written_vocabulary import WrittenVocabulary
from tokenizers import Tokenizer

ID_SECTIONS = ("model", "normalizer", "pre_tokenizer", "added_tokens")
"""The parts of the file that change ids; the rest adds BOS and EOS, or serves decoding."""


@final
class HuggingFaceVocabulary:
    """A `tokenizer.json`, with BOS, EOS and padding from its `tokenizer_config.json`.

    Without a `tokenizer_config.json`, each of them is the control entry with a conventional name;
    None if there is no such entry, or more than one.
    """

    own_encoder = "tokenizers"

    @without_collector()
    def __init__(
        self, content: bytes, config: bytes | None = None, *, parsed: JsonObject | None = None
    ) -> None:
        """Args: `parsed`, what `content` holds, if it has been parsed; it is kept and changed."""
        self._json = parse_tokenizer_json(content) if parsed is None else parsed
        self._secret = secrets.token_hex(16)
        model = self._json["model"]
        self._model_type = model.get("type") or _untyped_model(model)
        self._tokens = _model_tokens(model)
        _share_strings(model)
        added = with_configured_entries(self._json.get("added_tokens") or [], self._tokens, config)
        self._json["added_tokens"] = added
        self._added = {entry["content"]: int(entry["id"]) for entry in added}
        self._content = {
            entry["id"] for entry in added if is_content(entry["content"], special=entry["special"])
        }
        self.controls = {
            text: token_id
            for text, token_id in self._added.items()
            if token_id not in self._content
        }
        self.unknown_id = _unknown_id(model, self._tokens)
        self.size = 1 + max(*(max(ids.values(), default=-1) for ids in (self._tokens, self._added)))
        self._steps = [
            *flatten(self._json.get("normalizer")),
            *flatten(self._json.get("pre_tokenizer")),
        ]
        self.kind = self._find_kind()
        changing = [
            step["type"] for step in flatten(self._json.get("normalizer")) if not only_spaces(step)
        ]
        self.normalization = ", ".join(changing) or None
        self.adds_space = any(adds_space(step) for step in self._steps)
        self.bos_id = self._find_named("bos_token", config, BEGIN_NAMES)
        self.eos_id = self._find_named("eos_token", config, END_NAMES)
        self.pad_id = self._find_named("pad_token", config, PAD_NAMES)
        self.adds_bos = self.bos_id is not None and self._puts_bos(
            json.loads(config) if config is not None else {}
        )

    def identity(self) -> Iterator[bytes]:
        """See `Vocabulary`."""
        return canonical_json({section: self._json.get(section) for section in ID_SECTIONS})

    def encode(self, text: str, *, allow_control: bool) -> list[int]:
        """See `Vocabulary`."""
        encoder = self._whole if allow_control else self._scrubbed
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    def inner_files(self, files: Mapping[str, bytes]) -> dict[str, bytes] | None:
        """See `Vocabulary`."""
        changed = without_first_space(self._json.get("pre_tokenizer"))
        if changed == self._json.get("pre_tokenizer"):
            return None
        content = dump_tokenizer_json({**self._json, "pre_tokenizer": changed})
        return {**files, "tokenizer.json": content}

    def encode_with_positions(self, text: str, *, allow_control: bool) -> Positioned:
        """See `Vocabulary`."""
        encoding = (self._whole if allow_control else self._scrubbed).encode(
            text, add_special_tokens=False
        )
        return encoding.ids, encoding.offsets

    def encode_disguised(self, text: str, controls: Sequence[tuple[int, int, str]]) -> Positioned:
        """See `Vocabulary`; control entries get secret names, and only `controls` are replaced by
        these.
        """
        names, ids, encoder = self._disguised
        parts: list[str] = []
        begins, ends, done = [], [0], 0
        for begin, end, control in [*controls, (len(text), len(text), "")]:
            name = names.get(control, "")
            parts += [text[done:begin], name]
            begins += [*range(done, begin), *[begin] * len(name)]
            ends += [*range(done + 1, begin + 1), *[end] * len(name)]
            done = end
        begins.append(len(text))
        encoding = encoder.encode("".join(parts), add_special_tokens=False)
        return [ids.get(i, i) for i in encoding.ids], [
            (begins[low], ends[high]) for low, high in encoding.offsets
        ]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `Vocabulary`."""
        return _encode_each(self._scrubbed, texts)

    def sample_encoder(self, texts: Sequence[str]) -> Callable[[Sequence[str]], list[list[int]]]:
        """See `Vocabulary`."""
        if "_scrubbed" in vars(self):
            return self.encode_batch
        return partial(_encode_each, encoder_of_texts(self._scrubbed_json, texts))

    def decode(self, ids: Sequence[int]) -> str:
        """See `Vocabulary`."""
        text: str = self._whole.decode(list(ids), skip_special_tokens=False)
        return text

    @without_collector()
    def build_fast(self, missing: str | None) -> Encoder:
        """See `Vocabulary`."""
        if self.kind == "byte-level BPE":
            content = [text for text, i in self._added.items() if i in self._content]
            return fast_byte_level(
                self._scrubbed_json, lambda: self._scrubbed, self.size, content, missing
            )
        if missing is not None:
            raise TokenizerError(missing)
        if self.kind == "BPE":
            raise TokenizerError(
                "gigatoken cannot encode it: its BPE is neither of bytes nor falls back to them"
            )
        encoder = FastEncoder(backend=backend_from_json(self._scrubbed_json))
        if isinstance(self._tokens, WrittenVocabulary):
            give_back_memory()
        return encoder

    def build_byte_table(self, *, exact: bool) -> ByteTable:
        """See `Vocabulary`."""
        if exact:
            self._refuse_inexact()
        byte_level = self.kind == "byte-level BPE"
        spelled: Sequence[bytes | None]
        if byte_level:
            spelled = spell_byte_level(self._tokens)
        else:
            spell = spell_sentencepiece if exact else self._spell_roughly
            spelled = [spell(token) for token in self._tokens]
        entries: list[bytes | None] = [None] * self.size
        for token_id, token in zip(self._tokens.values(), spelled, strict=True):
            entries[token_id] = token
        for text, token_id in self._added.items():
            entries[token_id] = (text if byte_level else text.replace("▁", " ")).encode()
        for token_id in (
            *self.controls.values(),
            *([] if self.unknown_id is None else [self.unknown_id]),
        ):
            entries[token_id] = None
        return ByteTable(entries)

    @cached_property
    @without_collector()
    def _scrubbed_json(self) -> JsonObject:
        """The file without anything that turns text into a control entry, BOS or EOS."""
        scrubbed = {**self._json, "truncation": None, "padding": None, "post_processor": None}
        scrubbed["added_tokens"] = self._scrub_added()
        scrubbed["model"] = self._scrub_model()
        return scrubbed

    def _scrub_added(self) -> list[JsonObject]:
        """Content entries; control entries before them keep their place under a name that no text
        spells.

        The tokenizers package numbers entries that are not in the model by their place in the list,
        not by their id.
        """
        last = max(self._content, default=-1)
        kept = []
        for entry in self._json.get("added_tokens") or []:
            if entry["id"] in self._content:
                kept.append(entry)
            elif entry["id"] < last and entry["content"] not in self._tokens:
                kept.append({**entry, "content": self._hidden(entry["content"])})
        return kept

    def _scrub_model(self) -> JsonObject:
        model = dict(self._json["model"])
        if "dropout" in model:
            model["dropout"] = None
        if "merges" in model:
            model["merges"] = _without(model["merges"], self.controls)
        if self._model_type == "Unigram":
            model["vocab"] = [[self._hidden(token), score] for token, score in model["vocab"]]
        elif self._model_type != "BPE" or model.get("ignore_merges"):
            kept = model.get("unk_token")
            model["vocab"] = {
                (t if t == kept else self._hidden(t)): i for t, i in model["vocab"].items()
            }
        return model

    def _hidden(self, token: str) -> str:
        """A name that no text can spell, because it holds a secret, for control entries. It changes
        no id.
        """
        return f"{self._secret}{self.controls[token]}" if token in self.controls else token

    @cached_property
    def cuts(self) -> tuple[AddedEntry, ...] | None:
        """See `Vocabulary`.

        The tokenizers package cuts at entries that are not `normalized`, normalises each stretch,
        and cuts it again at the others. One pass over the text gives the same result if entries of
        the two kinds cannot overlap.
        """
        first = [entry for entry in self._listed if not entry.get("normalized")]
        second = [entry for entry in self._listed if entry.get("normalized")]
        if all(entry["id"] in self._content for entry in second):
            second = []  # each stretch's own encoder cuts at these
        elif self._json.get("normalizer") is not None or _may_overlap(first, second):
            return None
        cuts = [*first, *second]
        controls = [entry for entry in cuts if entry["id"] not in self._content]
        strips = [entry for entry in controls if entry.get("lstrip") or entry.get("rstrip")]
        spaced = any(entry["content"][:1].isspace() for entry in cuts)
        flagged = any(_takes_more(entry) for entry in self._listed if entry["id"] in self._content)
        if (
            any(entry.get("single_word") for entry in controls)
            or flagged
            or (strips and (spaced or second))
        ):
            return None
        return tuple(self._cut(entry) for entry in cuts)

    def _cut(self, entry: JsonObject) -> AddedEntry:
        return AddedEntry(
            text=entry["content"],
            token_id=entry["id"],
            is_control=entry["id"] not in self._content,
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
        )

    @cached_property
    def _listed(self) -> list[JsonObject]:
        """Added entries, and those that only `tokenizer_config.json` makes control entries, as
        transformers does.
        """
        listed = list(self._json.get("added_tokens") or [])
        flags = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        named = [
            (text, token_id) for text, token_id in self.controls.items() if text not in self._added
        ]
        return listed + [{"id": token_id, "content": text, **flags} for text, token_id in named]

    @cached_property
    def _disguised(self) -> tuple[dict[str, str], dict[int | None, int], Tokenizer]:
        """Hidden name of each control entry, its ids as the encoder numbers entries → real ids, and
        the encoder.
        """
        names = {}
        for text in self.controls:
            # It begins and ends as the entry does, as flags depend on neighbours; no name is a
            # prefix of another.
            names[text] = f"{text[0]}{self._hidden(text)}z{text[-1]}"
        listed = [
            {**entry, "content": names.get(entry["content"], entry["content"])}
            for entry in self._listed
        ]
        changes = {
            "added_tokens": listed,
            "model": self._scrub_model(),
            "truncation": None,
            "padding": None,
        }
        encoder = load_encoder({**self._json, **changes})
        real = {
            encoder.token_to_id(new["content"]): entry["id"]
            for new, entry in zip(listed, self._listed, strict=True)
        }
        return names, real, encoder

    @cached_property
    def _whole(self) -> Tokenizer:
        return load_encoder(
            {**self._json, "added_tokens": self._listed, "truncation": None, "padding": None}
        )

    @cached_property
    def _scrubbed(self) -> Tokenizer:
        return load_encoder(self._scrubbed_json)

    def _find_kind(self) -> str:
        if self._model_type != "BPE":
            return str(self._model_type)
        if any(step["type"] == "ByteLevel" for step in self._steps):
            return "byte-level BPE"
        return "SentencePiece BPE" if self._json["model"].get("byte_fallback") else "BPE"

    def _find_named(
        self, role: str, config: bytes | None, conventional: Sequence[str]
    ) -> int | None:
        named = json.loads(config).get(role) if config is not None else None
        if named is None:
            return named_control(self.controls, conventional) if config is None else None
        text = named["content"] if isinstance(named, dict) else named
        token_id = self._added.get(text, self._tokens.get(text))
        if token_id is None:
            raise TokenizerError(
                f"tokenizer_config.json: {role} is {text!r}, which is not in tokenizer.json; "
                f"its control entries are {list(self.controls)[:12]}; name one of them, or null"
            )
        self.controls.setdefault(text, token_id)
        return token_id

    def _puts_bos(self, config: JsonObject) -> bool:
        """Whether the file's post-processor puts BOS before a text.

        As in transformers, it alone decides: `add_bos_token` counts only where there is no
        tokenizer.json. Two classes of files differ: GPT-NeoX's, whose post-processor transformers
        ignores, and ours, which have none.
        """
        processor = self._json.get("post_processor")
        if str(config.get("tokenizer_class")).startswith("GPTNeoXTokenizer"):
            return False
        if processor is None:
            own = (
                ("bos_token", 0, "<|bos|>"),
                ("eos_token", 1, "<|eos|>"),
                ("pad_token", 2, "<|pad|>"),
            )
            return all(
                config.get(role) == text and self.controls.get(text) == number
                for role, number, text in own
            )
        return self.bos_id in before_a_text(processor)

    def _spell_roughly(self, token: str) -> bytes:
        """What a token with a prefix or suffix for word parts looks like in a text."""
        inside, last = (
            self._json["model"].get(name)
            for name in ("continuing_subword_prefix", "end_of_word_suffix")
        )
        if self.kind in ("WordPiece", "WordLevel") and not (inside and token.startswith(inside)):
            token = f"▁{token}"
        plain = token.removeprefix(inside or "").removesuffix(last or "")
        return spell_sentencepiece(plain + ("▁" if last and token.endswith(last) else ""))

    def _refuse_inexact(self) -> None:
        """Raise TokenizerError unless the bytes of every id are known."""
        model = self._json["model"]
        if self.kind == "WordPiece" or self.kind == "WordLevel":
            raise TokenizerError(
                f"no exact byte table: a {self.kind} vocabulary forgets whitespace and "
                "unknown words"
            )
        if self.kind != "byte-level BPE" and not model.get("byte_fallback"):
            raise TokenizerError(
                f"no exact byte table: this {self.kind} vocabulary has no byte fallback, so "
                "<unk> loses text"
            )
        if model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
            raise TokenizerError(
                "no exact byte table: tokens carry word suffixes or prefixes that are not in "
                "the text"
            )
        lossy = [name for name in (self.normalization or "").split(", ") if name not in ("", "NFC")]
        lossy += [
            step["type"]
            for step in self._steps
            if step["type"] in ("WhitespaceSplit", "Whitespace", "BertPreTokenizer")
        ]
        if lossy:
            raise TokenizerError(
                f"no exact byte table: {', '.join(lossy)} changes text before it is encoded"
            )


def _encode_each(encoder: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    # One text at a time: a batch would start a thread per core in each worker process.
    encode = encoder.encode_batch_fast
    return [encode([text], add_special_tokens=False)[0].ids for text in texts]


def _takes_more(entry: JsonObject) -> bool:
    return bool(entry.get("lstrip") or entry.get("rstrip") or entry.get("single_word"))


def _may_overlap(left: list[JsonObject], right: list[JsonObject]) -> bool:
    """Whether an entry of `left` and one of `right` could share characters of some text."""
    pairs = ((a["content"], b["content"]) for a in left for b in right)
    return any(_share(a, b) or _share(b, a) for a, b in pairs)


def _share(a: str, b: str) -> bool:
    return b in a or any(a.endswith(b[:length]) for length in range(1, len(b)))


def _untyped_model(model: JsonObject) -> str:
    """The type of a model from the first releases, which did not store it."""
    if "merges" in model:
        return "BPE"
    if isinstance(model["vocab"], list):
        return "Unigram"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def _model_tokens(model: JsonObject) -> Mapping[str, int]:
    if isinstance(model["vocab"], Mapping):
        vocabulary: Mapping[str, int] = model["vocab"]
        return vocabulary
    return {token: token_id for token_id, (token, _) in enumerate(model["vocab"])}


def _unknown_id(model: JsonObject, tokens: Mapping[str, int]) -> int | None:
    unknown: int | None = (
        tokens.get(model["unk_token"]) if model.get("unk_token") else model.get("unk_id")
    )
    return unknown


def _share_strings(model: JsonObject) -> None:
    """Let merges hold the vocabulary's own strings: half a million of them take a quarter of the
    memory.
    """
    merges, vocabulary = model.get("merges"), model["vocab"]
    if not merges or isinstance(merges, WrittenMerges) or not isinstance(vocabulary, dict):
        return
    if isinstance(merges[0], list):
        own = {token: token for token in vocabulary}.get
        with without_collector():
            model["merges"] = [(own(left, left), own(right, right)) for left, right in merges]


def _without(merges: Sequence[Any], made: Collection[str]) -> Sequence[Any]:
    """Merges without those that make one of these texts: "a b" in old files, a pair in new ones."""
    if isinstance(merges, WrittenMerges):
        return merges.without(made)
    if merges and isinstance(merges[0], str):
        return [merge for merge in merges if merge.replace(" ", "", 1) not in made]
    return [merge for merge in merges if "".join(merge) not in made]
