"""What a dataset of chats ships beside its tokens: the template that rendered them, and what ends a generation.

`chat.json` and `chat_template.jinja` lie in the dataset's folder, sealed by the manifest's checksums; the template lies
in its `tokenizer` folder too, where transformers looks for it. Export and serving take both from here.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

from penstock.errors import CorruptionError
from penstock.shards.files import check_regular, write_json, write_text
from penstock.shards.layout import TOKENIZER_FOLDER
from penstock.shards.strict_json import read_json, record_of

CHAT, CHAT_TEMPLATE = "chat.json", "chat_template.jinja"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInfo:
    """How the conversations of a dataset were rendered and what of them is trained."""

    template: str
    """The template's text, Jinja."""
    template_name: str
    template_fingerprint: str
    variables: dict[str, Any]
    """What the template saw besides the conversation."""
    date: str | None
    """The day that the template wrote, where it writes one."""
    stop_ids: tuple[int, ...]
    """Control tokens that end a generation."""
    stop_texts: tuple[str, ...]
    """What trained turns end with, control tokens or not."""
    settings: dict[str, Any]
    """`layout`, `knobs`, `cleaning`: every setting as it was in force."""

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write it into a dataset's folder.

        Returns:
            Names of the files, for `finish_dataset` to seal.
        """
        value = asdict(self)
        write_text(folder / CHAT_TEMPLATE, value.pop("template"))
        write_text(folder / TOKENIZER_FOLDER / CHAT_TEMPLATE, self.template)
        write_json(folder / CHAT, value)
        return CHAT, CHAT_TEMPLATE

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """That of a dataset; None where it is not one of chats.

        Raises:
            CorruptionError: It cannot be read.
        """
        if not (folder / CHAT).is_file():
            return None
        value = read_json(folder / CHAT)
        check_regular(folder / CHAT_TEMPLATE)
        try:
            template = (folder / CHAT_TEMPLATE).read_bytes().decode()
            return record_of(cls, {**value, "template": template} if isinstance(value, dict) else value)
        except (OSError, ValueError) as error:
            raise CorruptionError(f"{folder / CHAT}: {error}; copy it again, or prepare again") from None
