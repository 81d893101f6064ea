"""Find a vocabulary on disk or on the hub, and detect its format from its contents.

| given | read |
|---|---|
| `tokenizer.json`, `.json.gz` | Hugging Face; `tokenizer_config.json` next to it names BOS, EOS, padding |
| a folder | `tokenizer.json`, else `tekken.json`, `tokenizer.model`, one `.tiktoken`, or `vocab.json` |
| `*.tiktoken`, `.tiktoken.gz` | ranks; pattern by the published file name, `encoding.json` next to it, or `pattern=` |
| `*.model` | SentencePiece, or ranks as Meta's Llama 3 has them |
| `tekken*.json`, `.json.gz` | tekken |
| `vocab.json`, `merges.txt` | both: the byte-level BPE of GPT-2 |
| anything else | a name on the Hugging Face hub |

A chat template next to the vocabulary is loaded with it.
"""  # noqa: E501

import gzip
import json
import os
import re
from pathlib import Path

from penstock.core.errors import FormatError, TokenizerError
from penstock.core.folders import hub_copy
from penstock.core.json_values import JsonObject
from penstock.core.suggestions import suggests
from penstock.tokenizers.chat_templates import CHAT_TEMPLATE, TOOL_USE, template_beside
from penstock.tokenizers.ranks import LLAMA3_RANKS, PUBLISHED, llama3_controls, looks_like_ranks
from penstock.tokenizers.split_patterns import LLAMA3_PATTERN
from penstock.tokenizers.tokenizer import CONFIG, Tokenizer
from penstock.tokenizers.vocab_json import MERGES, VOCABULARY, files_of_merges
from penstock.tokenizers.written_merges import parse_tokenizer_json

FOLDER_ORDER = (
    *("tokenizer.json", "tokenizer.json.gz", "tekken*.json", "tekken*.json.gz"),
    *("tokenizer.model", "*.model", "*.tiktoken", "*.tiktoken.gz", VOCABULARY),
)
"""Files to look for in a folder; the first match is taken."""

_ENDINGS = (".json", ".gz", ".model", ".tiktoken", ".txt", ".gguf", ".bin", ".pth", ".safetensors")
_EXPECTED = "tokenizer.json, tekken.json, a .model or .tiktoken file, or vocab.json with merges.txt"
_FOREIGN = {
    re.compile(rb"GGUF"): "a GGUF file, which holds a model for llama.cpp",
    re.compile(
        rb"\d+ b?['\"].*['\"] \d+\r?\n"
    ): "a vocabulary of RWKV, which has a tokenizer of its own",
}
"""Beginnings of files that penstock does not read → what these files are."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@suggests
def load_tokenizer(
    path_or_name: str | os.PathLike[str], *, revision: str | None = None, pattern: str | None = None
) -> Tokenizer:
    """Load any tokenizer.

    Args:
        path_or_name: A file, a folder, or a name on the Hugging Face hub; see the table above.
        revision: Branch, tag or commit on the hub.
        pattern: Splitting pattern, for a file of ranks that is not one of the published ones.

    Raises:
        TokenizerError: There is no such file, folder or name, or its format is not supported.
        MissingExtraError: A hub name was given and huggingface_hub is not installed; or the package
            that encodes this vocabulary is not.
    """
    _refuse_other(path_or_name)
    path = Path(path_or_name)
    if path.is_dir():
        return _load_file(_find_in_folder(path), _folder_name(path), pattern)
    if path.is_file():
        return _load_file(path, _short_name(path), pattern)
    name = str(path_or_name)
    if name.endswith(_ENDINGS) or not _HUB_NAME.fullmatch(name):
        raise TokenizerError(f"{name}: no such file or folder")
    return _load_file(_find_in_folder(_download(name, revision)), name, pattern)


def _refuse_other(given: object) -> None:
    """Refuse what is no path and no name.

    Raises:
        TokenizerError: It is another object, such as a tokenizer of transformers.
    """
    if isinstance(given, str | os.PathLike):
        return
    cure = (
        "; save it, tokenizer.save_pretrained(FOLDER), and give the folder"
        if hasattr(given, "save_pretrained")
        else ""
    )
    found = "None" if given is None else f"{type(given).__name__} ({given!r:.60})"
    raise TokenizerError(
        f"tokenizer: found {found}, expected a folder, a file, a name on the Hugging Face hub, or "
        f"what ps.load_tokenizer or ps.train_tokenizer gave{cure}"
    )


def _short_name(path: Path) -> str:
    """The file's name; for names such as `tokenizer.json`, that of its folder."""
    return _folder_name(path.parent) if path.name.startswith("tokenizer.") else path.name


def _folder_name(folder: Path) -> str:
    """The folder's name; for a folder `tokenizer`, in a run or a dataset, also that of its
    parent.
    """
    folder = folder.resolve()
    return f"{folder.parent.name}/{folder.name}" if folder.name == "tokenizer" else folder.name


def _find_in_folder(folder: Path) -> Path:
    for wanted in FOLDER_ORDER:
        found = [path for path in sorted(folder.glob(wanted)) if path.is_file()]
        if len(found) > 1:
            raise TokenizerError(
                f"{folder}: {len(found)} files could be the vocabulary "
                f"({', '.join(p.name for p in found)}); name one"
            )
        if found:
            return found[0]
    for path in sorted([*folder.glob("*.gguf"), *folder.glob("rwkv_vocab*.txt")]):
        _refuse_foreign(path.read_bytes()[:4096], str(path))
    raise TokenizerError(f"{folder}: no vocabulary there; expected: {_EXPECTED}")


def _load_file(path: Path, name: str, pattern: str | None) -> Tokenizer:
    try:
        files, parsed = _read_files(path, pattern)
        return Tokenizer(name, files, parsed=parsed)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except RecursionError:
        raise TokenizerError(
            f"{path}: not a vocabulary that can be read: it is nested too deeply"
        ) from None
    except (KeyError, TypeError, ValueError, OSError, OverflowError) as error:
        raise TokenizerError(f"{path}: not a vocabulary that can be read: {error!r}") from error


_Read = tuple[dict[str, bytes], JsonObject | None]
"""The files of a vocabulary by canonical name, and what its tokenizer.json holds, if it has been
parsed.
"""


def _read_files(path: Path, pattern: str | None) -> _Read:
    """The files, decompressed, with the chat template next to them."""
    files, parsed = _vocabulary_files(path, pattern)
    for name in (CONFIG, CHAT_TEMPLATE):
        if name not in files and path.with_name(name).is_file():
            files[name] = _read(path.with_name(name))
    if (path.parent / TOOL_USE).is_file():
        template = template_beside(path.parent, json.loads(files.get(CONFIG, b"{}")))
        files[CHAT_TEMPLATE] = (template or "").encode()
    return files, parsed


def _vocabulary_files(path: Path, pattern: str | None) -> _Read:
    if path.name in (VOCABULARY, MERGES):
        return files_of_merges(path), None
    content = _read(path)
    plain = path.name.removesuffix(".gz")
    if plain.endswith(".tiktoken") or looks_like_ranks(content):
        encoding = _find_encoding(path, content, pattern)
        return {"tokenizer.tiktoken": content, "encoding.json": encoding}, None
    _refuse_foreign(content, "this")
    if plain.endswith(".model"):
        return {"tokenizer.model": content}, None
    return _json_files(content)


def _json_files(content: bytes) -> _Read:
    try:
        parsed = parse_tokenizer_json(content)
    except ValueError:
        if b"\x00" not in content[:4096] and _is_text(content):
            raise
        raise TokenizerError(
            f"not a vocabulary: it is binary, and begins with {content[:8]!r}; expected: "
            f"{_EXPECTED}"
        ) from None
    if not isinstance(parsed, dict) or ("vocab" in parsed and "config" in parsed):
        return {"tekken.json": content}, None
    if "model" not in parsed:
        raise TokenizerError(
            "expected: a tokenizer.json (key 'model') or a tekken.json (keys 'vocab', "
            f"'config'); found {list(parsed)[:6]}"
        )
    return {"tokenizer.json": content}, parsed


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _refuse_foreign(content: bytes, what: str) -> None:
    for beginning, kind in _FOREIGN.items():
        if beginning.match(content):
            raise TokenizerError(
                f"{what} is {kind}; penstock does not read its vocabulary: give the "
                "tokenizer.json of the model on the Hugging Face hub that it was made from"
            )


def _read(path: Path) -> bytes:
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def _find_encoding(path: Path, content: bytes, pattern: str | None) -> bytes:
    """What a file of ranks lacks: its pattern and its control entries."""
    settings, name = (
        path.with_name("encoding.json"),
        path.name.removesuffix(".gz").removesuffix(".tiktoken"),
    )
    if pattern is None and settings.is_file():
        return settings.read_bytes()
    controls: dict[str, int] = {}
    if pattern is None:
        count = content.count(b"\n") + (not content.endswith(b"\n"))
        if name in PUBLISHED:
            pattern, controls = PUBLISHED[name]
        elif count == LLAMA3_RANKS:
            pattern, controls = LLAMA3_PATTERN, llama3_controls(is_later=_is_later_llama(path))
        else:
            raise TokenizerError(
                f"a .tiktoken file does not hold its splitting pattern, and {name!r} is none of "
                f"{', '.join(PUBLISHED)}, nor are its {count:,} ranks the {LLAMA3_RANKS:,} of "
                f"Llama 3; give pattern=, "
                'or put it next to the file as encoding.json: {"pattern": "…", "special_tokens": '
                "{}}"
            )
    return json.dumps({"pattern": pattern, "special_tokens": controls}).encode()


def _is_later_llama(path: Path) -> bool:
    """Whether Meta's folder is of Llama 3.1 or later; the vocabularies differ only in names of
    control entries.
    """
    settings = path.with_name("params.json")
    return settings.is_file() and bool(json.loads(settings.read_bytes()).get("use_scaled_rope"))


def _download(name: str, revision: str | None) -> Path:
    """The folder in the hub's cache that holds the tokenizer files of `name`."""
    wanted = [
        "tokenizer.json",
        CONFIG,
        CHAT_TEMPLATE,
        TOOL_USE,
        "tekken.json",
        "tokenizer.model",
        VOCABULARY,
        MERGES,
    ]
    wanted += ["special_tokens_map.json", "added_tokens.json"]
    try:
        return hub_copy(name, wanted, revision)
    except FormatError as error:
        raise TokenizerError(
            f"{error}; offline, give a folder that holds tokenizer.json"
        ) from error
