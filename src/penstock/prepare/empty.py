"""What to say when no document came out: an empty dataset is of no use to anybody, and hides a mistake."""

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import RecordError
from penstock.prepare.part import PartRecord, forget_part, rejects_path
from penstock.sources import Damage, Reject


def refuse_empty(output: Path, records: Sequence[PartRecord], files: Sequence[str]) -> None:
    """Raise when there is no document, and forget the finished parts, so that the next try may have other settings.

    Args:
        output: The folder of the preparation.
        records: What became of each part.
        files: Names of all files.

    Raises:
        RecordError: No document came out; the message says where the records went.
    """
    if any(record.documents for record in records):
        return
    reason = _reason(output, records, files)
    for number, record in enumerate(records):
        forget_part(output, number, record)
    raise RecordError(f"no document came out, so there is no dataset: {reason}")


def _reason(output: Path, records: Sequence[PartRecord], files: Sequence[str]) -> str:
    total, rejects, filtered = (
        sum(getattr(record, name) for record in records) for name in ("records", "rejects", "filtered")
    )
    damaged = [one for record in records for one in record.damaged]
    if not total and damaged:
        return f"no record could be read; the first damaged file: {Damage(**damaged[0])}"
    if not total:
        others = len(files) - 1
        more = f" and {others} more {'file' if others == 1 else 'files'}" if others > 0 else ""
        return f"no record in {files[0] if files else 'the input'}{more}; name files that hold some"
    if not rejects and not filtered:
        return (
            f"the clean-up of chats dropped all of the {total:,} records, because none holds a reply that is trained; "
            "is the role of the replies in roles_to_train?"
        )
    if not rejects:
        return f"the transform dropped all of the {total:,} records"
    number = next(number for number, record in enumerate(records) if record.rejects)
    with open(rejects_path(output, number), "rb") as rejected:
        first = Reject(**json.loads(rejected.readline()))
    dropped = f" and the transform dropped {filtered:,}" if filtered else ""
    return f"{rejects:,} of {total:,} records were rejected{dropped}; the first: {first}"
