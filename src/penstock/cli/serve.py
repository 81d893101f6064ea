"""`penstock serve`: a model behind HTTP, as OpenAI's clients speak it, and a page to chat with it."""

from typing import Annotated

import typer

from penstock.cli.writing import ContextLength, Device, Model, Threads, load_writer
from penstock.serving.settings import ServeSettings

_DEFAULT = ServeSettings()
_LIMITS = "Limits"


def run(
    model: Model,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; any but a loopback address demands --api-key.")
    ] = _DEFAULT.host,
    port: Annotated[int, typer.Option(metavar="N", help="0: a free one.", min=0, max=65535)] = _DEFAULT.port,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="PENSTOCK_API_KEY",
            help="Serve only who sends this key, or one of several; better given by the environment, which other users "
            "do not see.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's id; by default the name of the folder.")
    ] = None,
    context_length: ContextLength = None,
    device: Device = "auto",
    threads: Threads = None,
    sequences: Annotated[
        int, typer.Option(metavar="N", help="Sequences side by side.", min=1, rich_help_panel=_LIMITS)
    ] = _DEFAULT.sequences,
    waiting: Annotated[
        int, typer.Option(metavar="N", help="Requests in the queue.", min=0, rich_help_panel=_LIMITS)
    ] = _DEFAULT.waiting,
    rate: Annotated[
        float,
        typer.Option(metavar="N", help="Requests a second of one client; 0: any.", min=0, rich_help_panel=_LIMITS),
    ] = _DEFAULT.requests_per_second,
    burst: Annotated[
        int, typer.Option(metavar="N", help="Requests at once of one client.", min=1, rich_help_panel=_LIMITS)
    ] = _DEFAULT.burst,
    max_tokens: Annotated[
        int, typer.Option(metavar="N", help="The longest reply.", min=1, rich_help_panel=_LIMITS)
    ] = _DEFAULT.max_tokens,
    grace: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="For running replies after SIGTERM.", min=0, rich_help_panel=_LIMITS),
    ] = _DEFAULT.grace_seconds,
) -> None:
    """Serve a model: /v1/models, /v1/completions, /v1/chat/completions, /health, /metrics, and a chat page at /.

    Clients of OpenAI's API work with it: base_url is the address that is printed, followed by /v1. SIGTERM or Ctrl-C
    lets running replies end, then stops.
    """
    settings = ServeSettings(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        sequences=sequences,
        waiting=waiting,
        requests_per_second=rate,
        burst=burst,
        max_tokens=max_tokens,
        grace_seconds=grace,
    )
    from penstock.serving import ServedModel, Server

    writer = load_writer(model, context_length=context_length, device=device, threads=threads, slots=sequences)
    served = ServedModel(
        name=name or writer.name,
        engine=writer.engine,
        tokenizer=writer.tokenizer,
        template=writer.template,
        context_length=writer.engine.context_length,
    )
    server = Server(
        served, settings, on_ready=lambda address: print(f"penstock: {served.name} at {address}", flush=True)
    )
    server.serve_until_stopped()
