"""Serves a run's model over the OpenAI API."""

from collections.abc import Callable
from typing import Any

from penstock.core.errors import ConfigError
from penstock.use.runs.generating import own_sampling, take_opening
from penstock.use.runs.keywords import OpeningKeywords, ServeKeywords
from penstock.use.runs.opening import Opened, writer_of
from penstock.use.runs.run_document import check_names
from penstock.use.serving.settings import ServeSettings


def serve(
    open_model: Callable[[OpeningKeywords], Opened], name: str | None, settings: dict[str, Any]
) -> None:
    """Serve until SIGTERM or Ctrl-C; see `Run.serve`."""
    check_names("Run.serve", settings, ServeKeywords, "name")
    opening = take_opening(settings)
    if "api_keys" in settings:
        settings["api_keys"] = tuple(settings["api_keys"])
    chosen = ServeSettings(**settings)
    from penstock.use.serving import ServedModel, Server

    opened = open_model(opening)
    writer = writer_of(opened, chosen.sequences)
    served = ServedModel(
        name=name or writer.name,
        engine=writer.engine,
        tokenizer=writer.tokenizer,
        template=writer.template,
        context_length=writer.engine.context_length,
        begin_ids=writer.begin_ids,
        sampling=own_sampling(opened.run),
        images=None if writer.images is None else writer.images.within(chosen.image_folder),
        parameters=writer.parameters,
    )
    if chosen.image_folder is not None and writer.images is None:
        raise ConfigError(f"image_folder: the model {writer.name} reads no images")
    Server(
        served,
        chosen,
        on_ready=lambda address: print(f"penstock: {served.name} at {address}", flush=True),
    ).serve_until_stopped()
