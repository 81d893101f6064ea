"""What a killed run of the same preparation left in the folder where this one goes on: its finished parts.

A manifest among it is right while nothing next to it changes: whatever changes something here takes the manifest away
first. Python may hand over other records than the last time, and the same place is used for them.
"""

from collections.abc import Mapping
from typing import final

from penstock.prepare.part import (
    PartRecord,
    Workshop,
    finished_numbers,
    forget_part,
    load_record,
    rejects_path,
    stamp_of,
)
from penstock.shards import ShardStore, output_errors, reopen_dataset
from penstock.sources import Part


@final
class Interrupted:
    """The finished parts in the folder of a preparation, as a killed run left them; none, when it is the first.

    Args:
        shop: The preparation.
    """

    def __init__(self, shop: Workshop) -> None:
        self._shop = shop
        self._folders = {split: shop.output / split for split in shop.settings.splits}
        self._open_stores()

    def find(self, number: int, part: Part) -> PartRecord | None:
        """The record of a part, if that very part was finished, by the same encoder, and its files are there.

        To be asked after the look at the input, which chooses the encoder.
        """
        record = load_record(self._shop.output, number)
        if record is None or not self._shop.settings.accepts(record.rejects, record.damaged):
            return None
        due = (part.identity, stamp_of(part), self._shop.tokenizer.encoder)
        if (record.identity, record.stamp, record.encoder) != due:
            return None
        if record.rejects and not rejects_path(self._shop.output, number).is_file():
            return None
        complete = all(self._stores[split].find(name) is not None for split, name in record.shards.items())
        return record if complete else None

    def forget(self, number: int) -> None:
        """Make room for a part that is made again, or is there no more."""
        self._reopen()
        record = load_record(self._shop.output, number)
        if record is not None:
            forget_part(self._shop.output, number, record)

    def keep_only(self, records: Mapping[int, PartRecord]) -> None:
        """Remove what is of no part of this run: the last one may have been killed with other records, or with more."""
        for number in finished_numbers(self._shop.output):
            if number not in records:
                self.forget(number)
        for split, folder in self._folders.items():
            due = {record.shards.get(split) for record in records.values()}
            with output_errors(folder):
                for path in folder.glob("part-*"):
                    if path.name not in due:
                        path.unlink()

    def _reopen(self) -> None:
        for folder in self._folders.values():
            reopen_dataset(folder)
        self._open_stores()

    def _open_stores(self) -> None:
        self._stores = {split: ShardStore(folder) for split, folder in self._folders.items()}
