"""The card of a prepared dataset on the Hub, its README.md: what it holds and how it is opened.

Its last line holds a hash of all above. A card without that line, or with another hash, was written
by somebody, and stays.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping

from penstock.core.yaml_files import write_yaml
from penstock.data.shards.format.manifest import CHAT, MANIFEST, Manifest
from penstock.data.stores.hub import repository_in

_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"),
          (10**7, "1M<n<10M"), (10**8, "10M<n<100M"), (10**9, "100M<n<1B"),
          (10**10, "1B<n<10B"), (10**11, "10B<n<100B"), (10**12, "100B<n<1T"))  # fmt: skip
"""The Hub's names for numbers of documents below a number."""
_MARK = re.compile(r"\n<!-- penstock wrote this card: ([0-9a-f]{32}); changed, it stays -->\n\Z")


def may_replace(card: bytes | None) -> bool:
    """Whether there is no card, or one that is as penstock wrote it."""
    if card is None or not card.strip():
        return True
    text = card.decode("utf-8", "replace")
    found = _MARK.search(text)
    return found is not None and found[1] == _hash(text[: found.start()])


def write_card(
    url: str, manifests: Mapping[str, bytes], read: Callable[[str], bytes | None]
) -> bytes:
    """The card of the datasets in a repository.

    Args:
        url: The repository, at a revision or not.
        manifests: Manifest of each dataset, by its name there (`train/manifest.json`).
        read: Gives a file of the datasets, or None.
    """
    parsed = {
        name.removesuffix(MANIFEST): Manifest.parse(content, url)
        for name, content in manifests.items()
    }
    chats = {name: json.loads(read(f"{name}{CHAT}") or b"{}") for name in parsed}
    first = next(iter(parsed))
    documents = sum(one.documents for one in parsed.values())
    facts = {name: _facts(one, chats[name]) for name, one in parsed.items()}
    front = {
        "tags": ["penstock", "tokenized"],
        "size_categories": [next((size for most, size in _SIZES if documents < most), "n>1T")],
        "viewer": False,
        "penstock": [
            {"folder": name.rstrip("/") or ".", **of_one} for name, of_one in facts.items()
        ],
    }
    place, name = url.rstrip("/"), repository_in(url).rpartition("/")[2]
    opened = f"{place}/{first}".rstrip("/")
    lines = [
        "---",
        write_yaml(front, "the card of the dataset").rstrip(),
        "---",
        "",
        f"# {name}",
        "",
        "Documents as token ids, prepared with penstock for training language models.",
        "",
        "| | " + " | ".join(name.rstrip("/") or "dataset" for name in parsed) + " |",
        "|---" * (len(parsed) + 1) + "|",
        *(
            f"| {key.replace('_', ' ')} | "
            + " | ".join(_cell(of_one.get(key, "")) for of_one in facts.values())
            + " |"
            # A template's facts, which one of them may lack, are all there or none.
            for key in max(facts.values(), key=len)
        ),
        "",
        "```python",
        "import penstock as ps  # pip install 'penstock[huggingface]'",
        "",
        f'dataset = ps.open_dataset("{opened}")',
        "```",
        "",
        "```bash",
        f"penstock inspect {opened}",
        f"penstock copy {place} data/{name}    # checks every file",
        "```",
    ]
    text = "\n".join(lines)
    mark = f"\n<!-- penstock wrote this card: {_hash(text)}; changed, it stays -->\n"
    return f"{text}{mark}".encode()


def _facts(manifest: Manifest, chat: Mapping[str, object]) -> dict[str, str | int]:
    """What the card says of one dataset; tokenizer and template by their names, without folders."""
    facts: dict[str, str | int] = {
        "documents": manifest.documents,
        "tokens": manifest.tokens,
        "trained_tokens": manifest.trained_tokens,
        "tokenizer": _base(manifest.tokenizer.name),
        "tokenizer_fingerprint": manifest.tokenizer.fingerprint,
        "vocabulary": manifest.tokenizer.vocab_size,
    }
    if "template_fingerprint" in chat:
        facts["chat_template"] = _base(str(chat.get("template_name")))
        facts["template_fingerprint"] = str(chat["template_fingerprint"])
    return {**facts, "fingerprint": manifest.fingerprint}


def _base(name: str) -> str:
    """A name without the folders of the machine on which it was used."""
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1]


def _cell(value: str | int) -> str:
    """A value in a table of Markdown."""
    if isinstance(value, int):
        return f"{value:,}"
    plain = re.sub(r"[\s`|<>]+", " ", value).strip()
    return f"`{plain}`" if plain else ""


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
