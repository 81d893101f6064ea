"""`penstock serve`: an OpenAI-compatible HTTP server for a model, with a chat page."""

from pathlib import Path
from typing import Annotated

import typer

import penstock as ps
from penstock.use.cli.model_options import ContextLength, Device, Model, Threads
from penstock.use.serving.settings import ServeSettings

_DEFAULT = ServeSettings()
_LIMITS = "Limits"


def run(
    model: Model,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Address to listen on; any but a loopback address requires --api-key.",
        ),
    ] = _DEFAULT.host,
    port: Annotated[
        int, typer.Option(metavar="N", help="Port; 0: any free one.", min=0, max=65535)
    ] = _DEFAULT.port,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="PENSTOCK_API_KEY",
            help=(
                "Require this key from clients; may be repeated. Safer in the environment "
                "variable, which other users cannot see."
            ),
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model id in the API; by default the folder's name."),
    ] = None,
    context_length: ContextLength = None,
    device: Device = "auto",
    threads: Threads = None,
    sequences: Annotated[
        int,
        typer.Option(metavar="N", help="Sequences in one batch.", min=1, rich_help_panel=_LIMITS),
    ] = _DEFAULT.sequences,
    waiting: Annotated[
        int,
        typer.Option(
            metavar="N", help="Maximum requests in the queue.", min=0, rich_help_panel=_LIMITS
        ),
    ] = _DEFAULT.waiting,
    rate: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Requests per second per client; 0: no limit.",
            min=0,
            rich_help_panel=_LIMITS,
        ),
    ] = _DEFAULT.requests_per_second,
    burst: Annotated[
        int,
        typer.Option(
            metavar="N", help="Burst of requests per client.", min=1, rich_help_panel=_LIMITS
        ),
    ] = _DEFAULT.burst,
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", help="Maximum tokens of a reply.", min=1, rich_help_panel=_LIMITS
        ),
    ] = _DEFAULT.max_tokens,
    image_folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help=(
                "Images that clients may name by path. By default they send each image in a data "
                "URL."
            ),
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time for running replies to finish after SIGTERM.",
            min=0,
            rich_help_panel=_LIMITS,
        ),
    ] = _DEFAULT.grace_seconds,
) -> None:
    """Serve a model: /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, /health,
    /metrics, and a chat page at /.

    Clients of OpenAI's API work with it: set base_url to the printed address followed by /v1.
    Models that read images get those of messages (image_url). At SIGTERM or Ctrl-C it lets running
    replies finish, then stops.

    Example:
        penstock serve runs/chat --port 8000
    """
    ps.open_run(model).serve(
        name=name,
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        sequences=sequences,
        waiting=waiting,
        requests_per_second=rate,
        burst=burst,
        max_tokens=max_tokens,
        grace_seconds=grace,
        image_folder=None if image_folder is None else str(image_folder),
        context_length=context_length,
        device=device,
        threads=threads,
    )
