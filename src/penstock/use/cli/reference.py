"""`penstock reference`: store a reference model's log-probabilities next to the data."""

import penstock as ps
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import MODEL, Given


@takes(
    settings=(
        MODEL,
        options(
            "use.runs.run.Run.reference",
            data=Option(argument=True, metavar="DATASET"),
            output=Option(metavar="FOLDER"),
            column=Option(metavar="NAME"),
            device=Option(),
            threads=Option(),
        ),
    )
)
def run(*, settings: Given) -> None:
    """Write a copy of a dataset with the log-probability that a reference model gives each trained
    token.

    Train on it with preference.reference: cached, without a second model in memory.

    Example:
        penstock reference runs/first data/chats -o data/chats-with-reference
    """
    output = settings["output"]
    found = ps.open_run(settings.pop("model")).reference(**settings)
    column = settings.get("column", "reference_log_probabilities")
    print(f"{output}: {len(found):,} documents with the column {column}")
