"""The command line: one file per verb, loaded only when it is used."""

import sys


def main() -> None:
    """Run the command line; errors of ours are printed without a traceback and exit with 1."""
    from penstock.errors import PenstockError

    try:
        _app()(prog_name="penstock")
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(1)


def _app():  # type: ignore[no-untyped-def]
    raise NotImplementedError
