"""`penstock serve`: an OpenAI-compatible HTTP server for a model, with a chat page."""

import penstock as ps
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import MODEL, OPENING, Given
from penstock.use.serving.settings import ServeSettings

_DEFAULT = ServeSettings()
_LIMITS = "Limits"


_SETTINGS = "use.serving.settings.ServeSettings"


@takes(
    settings=(
        MODEL,
        options("use.runs.run.Run.serve", "name"),
        options(
            _SETTINGS,
            "host",
            "port",
            "image_folder",
            api_keys=Option(flag="--api-key", metavar="KEY", envvar="PENSTOCK_API_KEY"),
        ),
        options(
            _SETTINGS,
            "sequences",
            "waiting",
            "waiting_seconds",
            "requests_per_client",
            "requests_per_second",
            "burst",
            "body_bytes",
            "body_seconds",
            "image_bytes",
            "images",
            "messages",
            "max_tokens",
            "choices",
            "grace_seconds",
            panel="Limits",
        ),
        OPENING,
    ),
)
def run(*, settings: Given) -> None:
    """Serve a model: /v1/models, /v1/completions, /v1/chat/completions, /v1/responses, /health,
    /metrics, and a chat page at /.

    Clients of OpenAI's API work with it: set base_url to the printed address followed by /v1.
    Models that read images get those of messages (image_url). At SIGTERM or Ctrl-C it lets running
    replies finish, then stops.

    Example:
        penstock serve runs/chat --port 8000
    """
    ps.open_run(settings.pop("model")).serve(**settings)
