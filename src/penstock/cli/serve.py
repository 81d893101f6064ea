"""`penstock serve`: a model behind HTTP, as OpenAI's clients speak it, and a page to chat with it."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.serving.settings import ServeSettings

_DEFAULT = ServeSettings()
_LIMITS = "Limits"


def run(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a model in the Hugging Face layout.")],
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
    context_length: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of prompt and reply together; by default as it was trained.", min=2),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Such as cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16; by default as it is stored.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads of the model on a CPU; by default torch decides.", min=1)
    ] = None,
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
        model_name=name,
        sequences=sequences,
        waiting=waiting,
        requests_per_second=rate,
        burst=burst,
        max_tokens=max_tokens,
        grace_seconds=grace,
    )
    from penstock.serving import Server, load_served_model

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    model = load_served_model(path, settings, context_length=context_length, device=device, dtype=dtype)
    server = Server(model, settings, on_ready=lambda address: print(f"penstock: {model.name} at {address}", flush=True))
    server.serve_until_stopped()
