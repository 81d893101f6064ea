"""Keyword arguments of `Loader`."""

# Written by `make keywords` from the classes that declare these settings.

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Required, TypedDict

from penstock.core.json_values import JsonMapping
from penstock.plan.inputs.requirements import Attention, InputRequirements
from penstock.plan.loader.companion import Companion
from penstock.plan.packing import Packing


class LoaderKeywords(TypedDict, total=False):
    """Settings of a loader; see `LoaderSettings`."""

    image_cache: str | Path | None
    image_cache_bytes: int
    prefetch_bytes: int
    cache: str | Path | None
    cache_bytes: int | None
    sequence_length: Required[int]
    rows_per_step: Required[int | Mapping[int, int]]
    seed: int
    packing: Packing
    window_rows: int
    patches_per_row: int | None
    documents_per_row: int | None
    max_document_tokens: int | None
    data_parallel: Any
    requirements: InputRequirements | None
    attention: Attention | None
    pad_id: int
    threads: int
    prefetch: int
    pin_memory: bool | None
    companion: Companion | None
    sum_over_ranks: Callable[[list[float]], Sequence[float]] | None
    continue_from: JsonMapping | None
    first_step: int
