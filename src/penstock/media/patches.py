"""A small processor of images that needs no model and no transformers: each image becomes one
square of patches.

For the reference transformer with vision, so that training on images can be read, tried and tested
from nothing. The image is resized to a square, and its patches follow each other row by row, one
slot for each.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.images import ImageSettings, probed_size, read_picture
from penstock.media.layout import Layout, Size, collapse
from penstock.tokenizers import Tokenizer
from penstock.tokenizers.loading import load_tokenizer

if TYPE_CHECKING:
    import PIL.Image

SETTINGS = "patch_processor.json"
TEMPLATE = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}{%- if "
    "message.content is string -%}{{ message.content }}{%- else -%}{%- for part in "
    "message.content -%}{%- if part.type == 'image' -%}{{ image_token }}{%- else -%}{{ "
    "part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor "
    "-%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""ChatML with images; `image_token` is the processor's."""


@final
class PatchProcessor:
    """Resizes images to a square and cuts it into patches.

    Args:
        tokenizer: It has a control token for images.
        image_size: Side of the square in pixels, a multiple of `patch`.
        patch: Side of a patch in pixels.
        image_token: The control token that stands for an image in a text, and for each of its
            patches in a row.

    Raises:
        ConfigError: The tokenizer has no such token, or sizes do not fit.
    """

    has_grids = False
    merge = 1
    kind = "PatchProcessor"
    medium: Literal["image", "audio"] = "image"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        image_size: int = 64,
        patch: int = 16,
        image_token: str = "<image>",
    ) -> None:
        if image_token not in tokenizer.special_tokens:
            raise ConfigError(
                f"the tokenizer {tokenizer.name} has no control token {image_token!r}; train "
                f"one that has: train_tokenizer(…, special_tokens=[{image_token!r}])"
            )
        if patch < 1 or image_size < patch or image_size % patch:
            raise ConfigError(
                f"image_size {image_size} must be a multiple of patch {patch}, and both 1 or more"
            )
        self.tokenizer, self.name = tokenizer, self.kind
        self.image_size, self.patch, self.placeholder = image_size, patch, image_token
        self.slot_id = tokenizer.special_tokens[image_token]
        self.repeated: Mapping[str, int] = {image_token: self.slot_id}
        self.template = TEMPLATE.replace("image_token", repr(image_token))

    @classmethod
    def load(cls, folder: Path) -> "PatchProcessor":
        """That of a folder that `save` wrote."""
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            return cls(load_tokenizer(folder), **settings)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{folder / SETTINGS}: not the settings of a processor: {error}"
            ) from error

    def save(self, output: str | Path) -> None:
        """Write its settings and its tokenizer to a folder, which is made if need be."""
        output = Path(output)
        output.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(output)
        (output / SETTINGS).write_text(
            json.dumps(self._settings, indent=2) + "\n", encoding="utf-8"
        )

    @property
    def _settings(self) -> JsonObject:
        return {"image_size": self.image_size, "patch": self.patch, "image_token": self.placeholder}

    @property
    def fingerprint(self) -> str:
        """Hex digest of what decides slots and pixels."""
        content = json.dumps([self.kind, self._settings], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def slots(self) -> int:
        """Of an image of any size."""
        return (self.image_size // self.patch) ** 2

    def read(self, data: bytes, settings: ImageSettings) -> "PIL.Image.Image":
        """The picture in a file's bytes; RecordError: it is not accepted."""
        return read_picture(data, settings)

    def size(self, data: bytes, settings: ImageSettings) -> Size:
        """(height, width) of a picture: by its header, or with the probe "decode" by its pixels."""
        return probed_size(data, settings)

    def blank(self, size: Size | None = None) -> "PIL.Image.Image":
        """A blank picture."""
        from PIL import Image

        height, width = size or (self.image_size, self.image_size)
        return Image.new("RGB", (width, height))

    def layout(self, size: Size) -> Layout:
        """What stands for an image of some size."""
        text, counts = collapse(self.placeholder * self.slots, [self.placeholder])
        return Layout(text, counts, self.slots, self.slots)

    def arrays(self, picture: "PIL.Image.Image") -> dict[str, Array]:
        """`pixel_values`, float32 [1, patches, 3 × patch²] from −1 to 1."""
        from PIL import Image

        square = picture.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR)
        side, patch = self.image_size // self.patch, self.patch
        pixels = np.asarray(square, np.float32) / np.float32(127.5) - np.float32(1)
        cut = pixels.reshape(side, patch, side, patch, 3).transpose(0, 2, 4, 1, 3)
        return {"pixel_values": np.ascontiguousarray(cut).reshape(1, side * side, -1)}

    def patches_of(self, arrays: JsonMapping) -> int:
        """Patches of the images in these arrays."""
        return int(np.prod(arrays["pixel_values"].shape[:2]))

    def joint_ids(self, text: str, pictures: Sequence[object]) -> list[int]:
        """Ids of a rendered conversation with these pictures, encoded as a whole."""
        whole = text.replace(self.placeholder, self.placeholder * self.slots)
        found: list[int] = self.tokenizer.encode(whole, allow_control=True).tolist()
        return found
