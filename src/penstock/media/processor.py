"""Processors of transformers, asked for one image at a time: its place in the text, and the arrays
of its pixels.

Which text stands for an image depends on its size alone, and each processor of transformers knows
it: the text that it puts in the place of the template's placeholder
(`ProcessorMixin.replace_image_token`). A blank image of the same size gives the same text, so it is
made once a size. The text is put into the rendered conversation before it is encoded, because its
ends may merge with their neighbours ("\\n\\n" in Gemma 3); runs of one token are encoded as a
single one and repeated afterwards, which gives the same ids much faster.

The arrays of an image do not depend on other images. Those of several are joined as the processor
itself joins them.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, final

import numpy as np

from penstock.core.arrays import Array
from penstock.core.errors import ConfigError, MissingExtraError, record_errors
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.media.images import ImageSettings, probed_size, read_picture
from penstock.media.layout import NOUNS, Layout, Size, collapse, pattern_of
from penstock.media.patches import SETTINGS, PatchProcessor
from penstock.media.sounds import read_sound, sound_size
from penstock.tokenizers.chat_templates import template_in

SIZES = 4096
"""Sizes of images whose layouts are kept."""

_PATCH = 16
"""Side of what counts as one patch, in pixels, where a processor makes none itself."""
_TYPICAL = (448, 448)
BLANK_SIZE = (56, 56)
"""Height and width of a blank image, in pixels."""
Medium = Literal["image", "audio"]


class Processor(Protocol):
    """Interface of image and audio processors; "image" means either."""

    @property
    def medium(self) -> Medium:
        """What it processes."""

    def read(self, data: bytes, settings: ImageSettings) -> Any:
        """The picture or samples in a file's bytes; RecordError: they are not accepted."""

    def size(self, data: bytes, settings: ImageSettings) -> Size:
        """(height, width) of what `read` gives, of a sound (1, samples): by the header, or with the
        probe "decode" after decoding it.
        """

    def blank(self, size: Size | None = None) -> Any:
        """A blank picture, or silence; None: of a usual size."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def placeholder(self) -> str:
        """What a template writes for an image."""

    @property
    def template(self) -> str | None:
        """Its chat template; None: it has none."""

    @property
    def repeated(self) -> Mapping[str, int]:
        """Tokens that stand in runs: text → id. Among them are the markers of rows and tiles of
        some models.
        """

    @property
    def slot_id(self) -> int:
        """The token whose embeddings the model replaces by features of the image."""

    @property
    def has_grids(self) -> bool:
        """Whether its arrays have the images' patches in time, height and width, from which
        positions follow.
        """

    @property
    def merge(self) -> int:
        """Patches that become one feature, along height and along width."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of what decides slots and pixels."""

    @property
    def kind(self) -> str:
        """Name of its class, and of the class that makes the pixels."""

    def layout(self, size: Size) -> Layout:
        """What stands for an image of some size; RecordError: it refuses it."""

    def arrays(self, picture: Any) -> dict[str, Array]:
        """What the model gets for one picture (RGB): name → array; RecordError: it refuses it."""

    def patches_of(self, arrays: JsonMapping) -> int:
        """Patches of the images in these arrays."""

    def joint_ids(self, text: str, pictures: Sequence[object]) -> list[int]:
        """Ids of a rendered conversation with these pictures, encoded together."""

    def save(self, output: Path) -> None:
        """Write its files, so that `load_processor` finds the same processor."""


@final
class HuggingFaceProcessor:
    """A processor of transformers.

    Args:
        inner: It itself, with a tokenizer and an image processor.
        name: For messages.

    Raises:
        ConfigError: It cannot be asked for one image, or reads no images.
    """

    def __init__(self, inner: Any, name: str = "") -> None:
        self.inner, self.name = inner, name or type(inner).__name__
        sees = getattr(inner, "image_processor", None) is not None and getattr(
            inner, "image_token", None
        )
        hears = getattr(inner, "_audio_processor", None) is not None and getattr(
            inner, "audio_token", None
        )
        if not sees and not hears:
            raise ConfigError(
                f"the processor {self.name} reads no images or sounds; give that of a model "
                "that does"
            )
        self.medium: Medium = "image" if sees else "audio"
        asked = "_process_images" if sees else "_process_audio"
        if not hasattr(inner, asked) or (hears and not sees and not _says_length(inner)):
            raise ConfigError(
                f"the processor {self.name} ({type(inner).__name__}) cannot say what stands "
                f"for one {self.medium}; update transformers to 5.23 or newer, or take "
                "another model"
            )
        self.layout = lru_cache(SIZES)(self._layout)

    def __reduce__(self) -> tuple[object, ...]:
        return HuggingFaceProcessor, (self.inner, self.name)

    @property
    def template(self) -> str | None:
        """Its chat template; None: it has none."""
        found = getattr(self.inner, "chat_template", None)
        return template_in({"chat_template": dict(found) if isinstance(found, Mapping) else found})

    @property
    def placeholder(self) -> str:
        """What a template writes for an image."""
        return str(self.inner.image_token if self.medium == "image" else self.inner.audio_token)

    def read(self, data: bytes, settings: ImageSettings) -> Any:
        """The picture or samples in a file's bytes; RecordError: they are not accepted."""
        if self.medium == "image":
            return read_picture(data, settings)
        return read_sound(data, self._rate, self._longest, settings.max_seconds)

    def size(self, data: bytes, settings: ImageSettings) -> Size:
        """(height, width) of what `read` gives, of a sound (1, samples): by the header, or with the
        probe "decode" after decoding it.
        """
        if self.medium == "image":
            return probed_size(data, settings)
        if settings.probe == "decode":
            return 1, len(self.read(data, settings))
        return 1, sound_size(data, self._rate, self._longest, settings.max_seconds)

    def blank(self, size: Size | None = None) -> Any:
        """A blank picture, or silence; None: of a usual size."""
        if self.medium == "audio":
            return np.zeros((size or (1, self._rate // 4))[1], np.float32)
        from PIL import Image

        height, width = size or BLANK_SIZE
        return Image.new("RGB", (width, height))

    @property
    def _rate(self) -> int:
        return int(self.inner._audio_processor.sampling_rate)

    @property
    def _longest(self) -> int:
        return int(getattr(self.inner._audio_processor, "n_samples", 0) or 1 << 40)

    @cached_property
    def repeated(self) -> Mapping[str, int]:
        """Tokens that stand in runs: text → id. Among them are the markers of rows and tiles of
        some models.
        """
        tokenizer = self.inner.tokenizer
        if self.medium == "audio":
            return {self.placeholder: int(tokenizer.convert_tokens_to_ids(self.placeholder))}
        ids = [one for one in getattr(self.inner, "image_token_ids", None) or () if one is not None]
        names = {tokenizer.convert_ids_to_tokens(one) for one in ids}
        named = (
            getattr(self.inner, "img_patch_token", None),
            getattr(tokenizer, "image_token", None),
        )
        names |= {self.placeholder, *(str(one) for one in named if one)}
        return {
            str(name): int(tokenizer.convert_tokens_to_ids(name))
            for name in sorted(filter(None, names))
        }

    @cached_property
    def slot_id(self) -> int:
        """The token whose embeddings the model replaces by features of the image: the most frequent
        of a layout.
        """
        if self.medium == "audio":
            return self.repeated[self.placeholder]
        text, counts, _ = self._expanded(_TYPICAL)
        totals: dict[str, int] = {}
        for name, count in zip(self._repeated_pattern.findall(text), counts, strict=True):
            totals[name] = totals.get(name, 0) + count
        return self.repeated[max(totals, key=lambda name: totals[name])]

    @cached_property
    def has_grids(self) -> bool:
        """Whether its arrays have the images' patches in time, height and width, from which
        positions follow.
        """
        return "image_grid_thw" in self.inner.model_input_names

    @property
    def kind(self) -> str:
        """Name of its class, and of the class that makes the pixels."""
        return f"{type(self.inner).__name__} {type(_pixels_or_samples(self.inner)).__name__}"

    def patches_of(self, arrays: JsonMapping) -> int:
        """Patches of the images in these arrays; where the processor makes none, squares of 16 x 16
        pixels.

        Of sounds, frames.
        """
        if self.medium == "audio":
            return int(arrays["feature_attention_mask"].sum())
        grid = arrays.get("image_grid_thw")
        if grid is not None:
            return int(np.prod(_as_numpy(grid), axis=1).sum())
        pixels = arrays["pixel_values"]
        shapes = [one.shape for one in pixels] if isinstance(pixels, list) else [pixels.shape]
        return -(-sum(int(np.prod(shape)) for shape in shapes) // (3 * _PATCH**2))

    @property
    def merge(self) -> int:
        """Patches that become one feature, along height and along width."""
        return int(getattr(self.inner.image_processor, "merge_size", 1))

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of what decides slots and pixels."""
        return fingerprint_of(self.inner)

    def _layout(self, size: Size) -> Layout:
        """Uncached `layout`.

        Raises:
            RecordError: The processor refuses such a size.
        """
        text, counts, patches = self._expanded(size)
        names = self._repeated_pattern.findall(text)
        slots = sum(
            count
            for name, count in zip(names, counts, strict=True)
            if self.repeated[name] == self.slot_id
        )
        return Layout(text, counts, slots, patches)

    def _expanded(self, size: Size) -> tuple[str, tuple[int, ...], int]:
        """The text that stands for an image, with its runs collapsed, their lengths, and the
        image's patches.
        """
        what = (
            f"an image of {size[1]}x{size[0]}"
            if self.medium == "image"
            else f"a sound of {size[1]:,} samples"
        )
        with record_errors(f"the processor {self.name} refuses {what}"):
            arrays, texts = self._process(self.blank(size))
            text, counts = collapse(texts[0] if texts else self.placeholder, self.repeated)
            return text, counts, self.patches_of(arrays)

    def arrays(self, picture: Any) -> dict[str, Array]:
        """What the model gets for one picture (RGB): name → array, of any shape.

        Raises:
            RecordError: The processor refuses it.
        """
        with record_errors(f"the processor {self.name} refuses the {NOUNS[self.medium]}"):
            found, _ = self._process(picture)
            names = set(self.inner.model_input_names) | {"pixel_values"}
            return {
                name: _as_numpy(value)
                for name, value in found.items()
                if name in names and _is_array(value)
            }

    def _process(self, picture: Any) -> tuple[JsonMapping, list[str]]:
        if self.medium == "audio":
            rate = {"sampling_rate": self._rate, "return_tensors": "pt"}
            heard: tuple[JsonMapping, list[str]] = self.inner._process_audio([picture], **rate)
            return heard
        images = [[picture]] if self.is_nested else [picture]
        result: tuple[JsonMapping, list[str]] = self.inner._process_images(
            images, **self._image_arguments
        )
        return result

    @cached_property
    def is_nested(self) -> bool:
        """Whether the processor wants a list of images for each text."""
        return type(self.inner).__name__ in (
            "Idefics2Processor",
            "Idefics3Processor",
            "SmolVLMProcessor",
        )

    @cached_property
    def _image_arguments(self) -> JsonMapping:
        merged = self.inner._merge_kwargs(
            tokenizer_init_kwargs=self.inner.tokenizer.init_kwargs, return_tensors="pt"
        )
        given: JsonObject = dict(merged["images_kwargs"])
        if "use_image_special_tokens" in inspect.signature(self.inner._process_images).parameters:
            given.setdefault(
                "use_image_special_tokens",
                merged["text_kwargs"].get("use_image_special_tokens", True),
            )
        return given

    @cached_property
    def _repeated_pattern(self) -> re.Pattern[str]:
        return pattern_of(self.repeated)

    def joint_ids(self, text: str, pictures: Sequence[object]) -> list[int]:
        """Ids of a rendered conversation with these pictures, as transformers encodes them
        together.

        Raises:
            RecordError: The processor refuses them.
        """
        given: JsonObject = {"images": list(pictures)} if pictures else {}
        if pictures and self.medium == "audio":
            given = {"audio": list(pictures), "sampling_rate": self._rate}
        with record_errors(
            f"the processor {self.name} refuses the text with its {NOUNS[self.medium]}s"
        ):
            found = self.inner(text=[text], add_special_tokens=False, **given)["input_ids"][0]
            return [int(one) for one in found]

    def save(self, output: Path) -> None:
        """Write its files, so that `load_processor` finds the same processor."""
        self.inner.save_pretrained(str(output))


def load_processor(path: str | Path) -> Processor:
    """The processor of a model's folder, or by its name on the Hub; or one of our own
    (`PatchProcessor`).

    Raises:
        ConfigError: There is none, or it reads no images.
        MissingExtraError: transformers or Pillow is not installed.
    """
    if (Path(path) / SETTINGS).is_file():
        return PatchProcessor.load(Path(path))
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("pillow", "vision") from error
    try:
        from transformers import AutoProcessor
    except ImportError as error:
        raise MissingExtraError("transformers", "huggingface") from error
    try:
        inner = AutoProcessor.from_pretrained(str(path))
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: no processor can be loaded from there: {reason}") from error
    return HuggingFaceProcessor(inner, Path(path).name)


def fingerprint_of(inner: Any) -> str:
    """Hex digest of a processor's class and settings, without those of its tokenizer."""
    image = _pixels_or_samples(inner)
    settings = {
        "processor": type(inner).__name__,
        "image_processor": type(image).__name__.removesuffix("Fast").removesuffix("Pil"),
        "settings": image.to_dict(),
        "own": {
            name: value
            for name, value in inner.to_dict().items()
            if isinstance(value, int | float | str)
        },
    }
    settings["own"].pop("chat_template", None)
    content = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _pixels_or_samples(inner: Any) -> Any:
    """The part of a processor that makes arrays."""
    return getattr(inner, "image_processor", None) or inner._audio_processor


def _says_length(inner: Any) -> bool:
    """Whether an audio processor expands its placeholder by its own method."""
    return type(inner).replace_audio_token is not _base_of(inner).replace_audio_token


def _base_of(inner: Any) -> Any:
    from transformers import ProcessorMixin

    return ProcessorMixin if isinstance(inner, ProcessorMixin) else type(inner)


def join_arrays(images: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Arrays of several images as the processor gives them for all at once.

    They follow each other along the first axis, or the second where the first is the text's
    (Idefics 3, SmolVLM: pixels `[1, tiles, 3, height, width]`; Llama 3.2 Vision: `[1, images,
    tiles, 3, height, width]`); the other axes are padded at their ends with zeros to the largest.
    """
    joined = {}
    for name in dict.fromkeys(name for image in images for name in image):
        parts = [image[name] for image in images if name in image]
        axis = int(is_nested(images[0]) and parts[0].ndim > 1)
        joined[name] = _join(parts, axis)
    return joined


def is_nested(image: Mapping[str, Array]) -> bool:
    """Whether the first axis of an image's arrays is the text's."""
    pixels = image.get("pixel_values")
    if "aspect_ratio_ids" in image:
        return True
    return pixels is not None and pixels.ndim == 5 and "pixel_attention_mask" in image


def _join(parts: Sequence[Array], axis: int) -> Array:
    if len(parts) == 1:
        return parts[0]
    largest = [max(part.shape[d] for part in parts) for d in range(parts[0].ndim)]
    padded = []
    for part in parts:
        more = [(0, 0 if d == axis else largest[d] - part.shape[d]) for d in range(part.ndim)]
        padded.append(np.pad(part, more) if any(after for _, after in more) else part)
    return np.concatenate(padded, axis)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0


def _as_numpy(value: Any) -> Array:
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        value = value.float()  # exact; NumPy has no such type, and models convert their pixels
    found: Array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    return found
