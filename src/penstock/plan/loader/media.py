"""Images of the rows of a loader: read, decoded and processed in its threads, one by one, then
joined over each row.

Nothing of it is in the plan or in a state: pixels depend on the image and the processor alone.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, final

import numpy as np

from penstock.core.arrays import Array, Int64, Records
from penstock.core.errors import ConfigError, CorruptionError, RecordError
from penstock.data.shards import Corpus
from penstock.data.shards.format.images import ImageOf
from penstock.data.shards.format.trees import Tree
from penstock.data.shards.tables.columns import ExtraTable
from penstock.data.stores.daemons import DaemonPool, wait_for
from penstock.media.images import ImageSettings
from penstock.media.layout import NOUNS
from penstock.media.processor import Processor, join_arrays
from penstock.media.rows import RowMedia, blank_image, grid_positions
from penstock.plan.loader._plan_kernels import PIECE
from penstock.plan.loader.image_cache import ImageCache

_REQUESTS = 32
"""Images of a store that are fetched at the same time."""


@final
class MediaRows:
    """Makes the images of rows.

    Args:
        names: Of the sources.
        datasets: Of the sources.
        tables: Lists of images of the sources; None: it has none.
        cache: Folder for processed images; None: each is processed whenever it is needed.
        cache_bytes: Maximum bytes of that folder.

    Raises:
        ConfigError: Two sources have images of different processors.
    """

    def __init__(
        self,
        names: Sequence[str],
        datasets: Sequence[Corpus],
        tables: Sequence[ExtraTable | None],
        cache: str | Path | None,
        cache_bytes: int,
    ) -> None:
        self._tables, self._names = tables, names
        self._settings: list[ImageSettings | None] = []
        first: tuple[str, str, Corpus] | None = None
        for name, dataset, table in zip(names, datasets, tables, strict=True):
            media = dataset.media
            if table is None or not table.has_images or media is None:
                self._settings.append(None)
                continue
            self._settings.append(ImageSettings(**media.settings))
            first = first or (name, media.fingerprint, dataset)
            if media.fingerprint != first[1]:
                raise ConfigError(
                    f"sources {first[0]!r} and {name!r} were prepared with different "
                    "processors of images; prepare both with that of the model"
                )
        processor = first and first[2].processor
        assert processor is not None
        self.processor = processor
        self.blank = blank_image(self.processor)
        self._caches: list[ImageCache | None] = []
        self._kinds: list[bytes] = []
        for settings in self._settings:
            kind = "" if settings is None else _kind(self.processor, settings)
            self._kinds.append(bytes.fromhex(kind))
            self._caches.append(
                None if not kind or cache is None else ImageCache(cache, kind, cache_bytes)
            )

    def rows(
        self,
        pieces: Annotated[Records, PIECE, "pieces"],
        row_starts: Annotated[Int64, "rows+1"],
        tokens: Array,
        trees: Sequence[Tree | None],
    ) -> list[RowMedia]:
        """The images of filled rows, `tokens` [R, T]; `pieces` are those of the step, `trees` those
        of the rows' documents.

        Raises:
            CorruptionError: An image is missing or damaged; names its source and document.
        """
        images = [
            [self._images(one["source"], one["document"]) for one in pieces[begin:end]]
            for begin, end in pairwise(row_starts.tolist())
        ]
        self._fetch(image for row in images for of_document in row for image in of_document)
        first = int(row_starts[0])
        return [
            self._row(
                pieces[begin:end], images[row], tokens[row], trees[begin - first : end - first]
            )
            for row, (begin, end) in enumerate(pairwise(row_starts.tolist()))
        ]

    def _images(self, source: int, document: int) -> list[ImageOf]:
        table = self._tables[source]
        return [] if table is None else table.images(int(document))

    def _fetch(self, images: Iterable[ImageOf]) -> None:
        """Bring images from stores, several at once; what fails is asked for again, and raises,
        where it is read.
        """
        kept = [cache for cache in self._caches if cache is not None]
        wanted = [
            image.fetch
            for image in images
            if image.fetch is not None and not any(image.digest in cache for cache in kept)
        ]
        if wanted:
            with DaemonPool(min(_REQUESTS, len(wanted)), "penstock-images") as pool:
                for coming in [pool.submit(fetch) for fetch in wanted]:
                    wait_for(coming)

    def _row(
        self,
        pieces: Annotated[Records, PIECE, "documents"],
        images_of: Sequence[list[ImageOf]],
        tokens: Array,
        trees: Sequence[Tree | None],
    ) -> RowMedia:
        found: list[tuple[int, int, ImageOf]] = []
        arrays, slots, keys = [], [], []
        ends = np.cumsum(pieces["length"], dtype=np.int64)
        spatial = self.processor.has_grids
        positions = np.zeros((4, len(tokens)), np.int64) if spatial else None
        for number, (source, document, end, length) in enumerate(
            zip(
                pieces["source"].tolist(),
                pieces["document"].tolist(),
                ends.tolist(),
                pieces["length"].tolist(),
                strict=True,
            )
        ):
            images, begin = images_of[number], end - length
            made = [self._arrays(image, source, document) for image in images]
            places = [
                begin
                + image.begin
                + np.flatnonzero(
                    tokens[begin + image.begin : begin + image.end] == self.processor.slot_id
                )
                for image in images
            ]
            for image, of_image in zip(images, places, strict=True):
                if len(of_image) != image.slots:
                    raise CorruptionError(
                        f"{self._place(source, document, image)}: {len(of_image)} slots of it "
                        f"in the tokens, expected {image.slots}; prepare again"
                    )
            found += [(number, begin, image) for image in images]
            keys += [image.digest + self._kinds[source] for image in images]
            arrays += made
            slots += places
            if positions is not None:
                positions[:, begin:end] = _positions(
                    trees[number],
                    length,
                    [place - begin for place in places],
                    [one["image_grid_thw"] for one in made],
                    self.processor.merge,
                )
        if positions is not None and len(pieces):
            positions[:, ends[-1] :] = np.arange(len(tokens) - ends[-1])
        return RowMedia(
            begins=np.array([begin + image.begin for _, begin, image in found], np.int32),
            ends=np.array([begin + image.end for _, begin, image in found], np.int32),
            slots=np.concatenate(slots).astype(np.int64) if slots else np.empty(0, np.int64),
            documents=np.array([number for number, _, _ in found], np.int32),
            patches=np.array([image.patches for *_, image in found], np.int32),
            arrays=join_arrays(arrays) if arrays else {},
            positions=None if positions is None else positions[:, None],
            digests=tuple(image.digest for *_, image in found),
            keys=tuple(keys),
            blank=self.blank,
        )

    def _arrays(self, image: ImageOf, source: int, document: int) -> dict[str, Array]:
        settings = self._settings[source]
        assert settings is not None

        def make() -> dict[str, Array]:
            return self.processor.arrays(self.processor.read(image.read(), settings))

        cache = self._caches[source]
        try:
            made = make() if cache is None else cache.get(image.digest, make)
        except (RecordError, CorruptionError) as error:
            raise CorruptionError(f"{self._place(source, document, image)}: {error}") from error
        if self.processor.patches_of(made) != image.patches:
            raise CorruptionError(
                f"{self._place(source, document, image)} has "
                f"{self.processor.patches_of(made)} patches, expected {image.patches}: this "
                "version of transformers processes images in another way; prepare again"
            )
        return made

    def _place(self, source: int, document: int, image: ImageOf) -> str:
        noun = NOUNS[self.processor.medium]
        return (
            f"source {self._names[source]!r}, document {document}: {noun} "
            f"{image.name or image.digest.hex()}"
        )


def _positions(
    tree: Tree | None,
    length: int,
    places: Sequence[Annotated[Int64, "slots"]],
    grids: Sequence[Annotated[Int64, "1 3"]],
    merge: int,
) -> Annotated[Int64, "4 tokens"]:
    """Positions of a document's tokens: of the text, then in time, height and width. Those of a
    tree count along each path; what paths share has the same in all, as it has the same beginning.

    Args:
        tree: Of the document; None: it is one path.
        length: Its stored tokens.
        places: Slots of each image's features in the document.
        grids: Patches of each image.
        merge: As for `grid_positions`.
    """
    found = np.empty((4, length), np.int64)
    for path in range(1 if tree is None else len(tree.paths)):
        slots = np.arange(length) if tree is None else tree.slots(path)
        at = [np.searchsorted(slots, own) for own in places]
        own = [
            number
            for number, (begin, inside) in enumerate(zip(at, places, strict=True))
            if begin[0] < len(slots) and slots[begin[0]] == inside[0]
        ]
        found[0, slots] = np.arange(len(slots))
        found[1:, slots] = grid_positions(
            np.concatenate([np.empty(0, np.int64), *(at[number] for number in own)]),
            len(slots),
            np.concatenate([np.empty((0, 3), np.int64), *(grids[number] for number in own)]),
            merge,
        )
    return found


def _kind(processor: Processor, settings: ImageSettings) -> str:
    """Hex digest of what decides the arrays of an image, the versions of packages included."""
    versions = {}
    for package in ("transformers", "torchvision", "pillow", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    decided = [processor.fingerprint, processor.kind, settings.decoding, versions]
    return hashlib.blake2b(json.dumps(decided, sort_keys=True).encode(), digest_size=8).hexdigest()
