"""What a run can do: generate, evaluate, serve, export. The methods of `Run` and the command line
share this code.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from safetensors import SafetensorError

from penstock.core.errors import ConfigError, OutputError
from penstock.core.json_files import json_text
from penstock.core.terminal import visible
from penstock.core.yaml_files import read_yaml
from penstock.learn.evaluation.results import run_task
from penstock.learn.evaluation.subject import Subject
from penstock.learn.evaluation.tasks import LM_EVAL, TaskSettings, check_name, make_task
from penstock.learn.generation.session import first_id, fit_chat, room_for
from penstock.learn.generation.settings import Sampling, sampling_defaults
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.run_folder import RUN_FILE, RunFolder
from penstock.media.processor import load_processor
from penstock.models import export, export_adapter, merge_lora
from penstock.models.exporting import check_output
from penstock.models.lora.export import base_name
from penstock.models.saving import load_model
from penstock.plan.loader.mixture import Mixture, Source
from penstock.tokenizers.loading import load_tokenizer
from penstock.use.runs.keywords import (
    EvaluateKeywords,
    GenerateKeywords,
    OpeningKeywords,
    ServeKeywords,
)
from penstock.use.runs.opening import Opened, context_of, template_of, writer_of
from penstock.use.runs.rollouts import write_rollouts
from penstock.use.runs.run_document import check_names
from penstock.use.serving.settings import ServeSettings

if TYPE_CHECKING:
    from penstock.use.runs.opening import Writer
    from penstock.use.runs.rollouts import Rollouts

MOST_AT_ONCE = 32
"""Maximum number of texts generated at the same time."""
TEMPERATURE = 0.8
"""Default temperature of a model whose base has none."""
Asked = list[tuple[str, Sampling]]
"""Prompts, each with its sampling settings."""


def ask(prompts: Sequence[str], num: int, sampling: Sampling) -> Asked:
    """Each prompt `num` times, with seeds counting up from that of `sampling`."""
    return [
        (text, replace(sampling, seed=sampling.seed + number))
        for text in prompts
        for number in range(num)
    ]


def prompt_ids(writer: "Writer", asked: Asked) -> list[list[int]]:
    """The tokens of each prompt, after BOS if the model was trained with it; an empty one needs
    some token.
    """
    first = first_id(writer.tokenizer, writer.begin_ids)
    ids = [[*writer.begin_ids, *writer.tokenizer.encode(text).tolist()] for text, _ in asked]
    return [one or ([] if first is None else [first]) for one in ids]


def write_texts(
    open_model: Callable[[OpeningKeywords], Opened],
    prompts: Sequence[str],
    settings: dict[str, Any],
) -> list[str]:
    """The text of each prompt; see `Run.generate`."""
    check_names("Run.generate", settings, GenerateKeywords)
    opening = take_opening(settings)
    # Refused before the model is read.
    _sampling(settings, {})
    if not prompts:
        return []
    opened = open_model(opening)
    asked = ask(prompts, 1, _sampling(settings, own_sampling(opened.run)))
    writer = writer_of(opened, min(len(asked), MOST_AT_ONCE))
    written = writer.engine.generate_all(prompt_ids(writer, asked), [how for _, how in asked])
    return [one.text for one in written]


def sample_rollouts(
    open_model: Callable[[OpeningKeywords], Opened],
    prompts: Sequence[Any],
    reward: Any,
    output: str | Path,
    samples: int,
    progress: bool,
    settings: dict[str, Any],
) -> "Rollouts":
    """Answers to prompts, judged, as a dataset; see `Run.rollouts`."""
    check_names("Run.rollouts", settings, GenerateKeywords, "samples", "progress")
    opening = take_opening(settings)
    # A policy learns from what was drawn, so the base's own filters do not count.
    sampling = _sampling({"temperature": 1.0, **settings}, {})
    records = [{"prompt": one} if isinstance(one, str) else one for one in prompts]
    return write_rollouts(
        open_model(opening),
        records,
        reward,
        output,
        samples=samples,
        sampling=sampling,
        progress=progress,
    )


def write_reply(
    open_model: Callable[[OpeningKeywords], Opened],
    messages: Sequence[Any],
    settings: dict[str, Any],
) -> str:
    """The reply to a conversation; see `Run.chat`."""
    check_names("Run.chat", settings, GenerateKeywords)
    opening = take_opening(settings)
    _sampling(settings, {})
    opened = open_model(opening)
    if opened.template is None:
        raise ConfigError(
            f"{opened.run.path}: it has no chat template; it was not trained on chats; use "
            "Run.generate"
        )
    sampling = _sampling({"min_tokens": 1, **settings}, own_sampling(opened.run))
    writer = writer_of(opened, 1)
    engine, images = writer.engine, None if writer.images is None else writer.images.within("")
    prompt = fit_chat(
        messages, opened.template, opened.tokenizer, room=room_for(engine, sampling), images=images
    )
    [written] = engine.generate_all([prompt.ids], [sampling], images=[prompt.images])
    text: str = written.text
    return text


def own_sampling(run: RunFolder) -> dict[str, Any]:
    """The defaults of sampling that a model's base gives.

    Raises:
        ConfigError: One is out of range.
    """
    return sampling_defaults(run.facts.generation)


def sampling_of(given: dict[str, Any], own: dict[str, Any]) -> Sampling:
    """The sampling that arguments give, else the model's own defaults, else ours."""
    return Sampling(**{"temperature": TEMPERATURE, **own, **given})


def _sampling(settings: dict[str, Any], own: dict[str, Any]) -> Sampling:
    """Keyword arguments as settings; `stop` may be one string or several."""
    if "stop" in settings:
        settings["stop"] = (
            (settings["stop"],) if isinstance(settings["stop"], str) else tuple(settings["stop"])
        )
    return sampling_of(settings, own)


def take_opening(settings: dict[str, Any]) -> OpeningKeywords:
    """Remove the keywords for opening a model from `settings`, and return them."""
    found: Any = {
        name: settings.pop(name) for name in OpeningKeywords.__annotations__ if name in settings
    }
    opening: OpeningKeywords = found
    return opening


SLOTS_CPU, SLOTS_GPU = 8, 64
"""Number of replies generated at the same time."""
Data = str | Source | Mixture
"""A dataset's folder, or sources."""


def evaluate_run(
    open_model: Callable[[OpeningKeywords], Opened],
    what: Sequence[str | Path | Source | Mixture],
    output: Path | None,
    rows: int | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """See `Run.evaluate`."""
    check_names("Run.evaluate", settings, EvaluateKeywords, "output", "rows")
    opening = take_opening(settings)
    names = [one for one in what if isinstance(one, str) and not Path(one).exists()]
    if settings.get("data") is not None and len(names) != 1:
        raise ConfigError(
            f"Run.evaluate: data belongs to one task, and {len(names)} are named; call it "
            "once per task"
        )
    tasks = [TaskSettings(name=name, **settings) for name in names]
    data = [str(one) if isinstance(one, Path) else one for one in what if one not in names]
    return evaluate(lambda: open_model(opening), data, tasks, output, rows)[0]


def evaluate(
    open_model: Callable[[], Opened],
    data: Sequence[Data],
    settings: Sequence[TaskSettings],
    output: Path | None = None,
    rows: int | None = None,
) -> tuple[dict[str, Any], list[Any]]:
    """Measure a model: its loss on datasets and its scores on tasks.

    Args:
        open_model: Called once the tasks are known to exist.
        data: Held-out data; each document is used once.
        settings: Settings of the tasks.
        output: Folder for answers and results.json; None: nothing is saved.
        rows: Approximate number of rows to use of each dataset; None: all.

    Returns:
        The figures as JSON values, and the results of the tasks.

    Raises:
        ConfigError: There is nothing to measure, no such task or no data for it, or chats are
            requested of a model without a chat template.
    """
    if not data and not settings:
        raise ConfigError("nothing to measure: name a task, such as gsm8k, or held-out data")
    tasks = _make(settings)
    found = open_model()
    if any(one.chat for one in settings) and found.template is None:
        raise ConfigError(f"{found.run.path}: it has no chat template; leave out chat")
    losses = _losses(found, data, rows)
    scores = _run_tasks(found, settings, tasks, output) if settings else []
    figures: dict[str, Any] = {
        "model": str(found.run.path),
        "step": found.run.step,
        "context_length": found.context_length,
        "results": losses,
    }
    if settings:
        figures["tasks"] = [one.to_json() for one in scores]
    if output is not None:
        _save(output, figures)
    return figures, scores


def _make(settings: Sequence[TaskSettings]) -> list[Any]:
    """Create the tasks, before the model is loaded; None for tasks of lm-eval.

    Raises:
        ConfigError: There is no such task, or no data.
    """
    for one in settings:
        check_name(one.name)
    return [None if one.name.startswith(LM_EVAL) else make_task(one) for one in settings]


def _run_tasks(
    found: Opened, settings: Sequence[TaskSettings], tasks: list[Any], output: Path | None
) -> list[Any]:
    """The results of all tasks, in the given order."""
    subject = Subject(
        found.model,
        found.tokenizer,
        context_length=found.context_length,
        stop_ids=found.run.stop_ids,
        template=found.template,
        begin_ids=found.begin_ids,
        slots=SLOTS_CPU if found.model.device.type == "cpu" else SLOTS_GPU,
    )
    results: list[Any] = []
    for one, made in zip(settings, tasks, strict=True):
        if made is None:
            results += _run_lm_eval(subject, one, output)
        else:
            answers = None if output is None else output / one.name / "answers.jsonl"
            results.append(run_task(made, subject, answers=answers))
    return results


def _run_lm_eval(subject: Any, one: TaskSettings, output: Path | None) -> Any:
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    return run_lm_eval(
        [one.name.removeprefix(LM_EVAL)],
        subject,
        limit=one.limit,
        shots=one.shots,
        chat=one.chat,
        seed=one.seed,
        folder=None if one.data is None else Path(one.data),
        cache=output,
    )


def _losses(found: Opened, data: Sequence[Data], rows: int | None) -> list[dict[str, Any]]:
    """The figures of all datasets; a dataset that does not fit the model is refused before any is
    measured.
    """
    from penstock.learn.training.held_out_loss import HeldOutLoss
    from penstock.learn.training.stop import Watched

    looks = [
        HeldOutLoss(
            one,
            sequence_length=found.row_length,
            tokenizer=found.tokenizer,
            model=found.model,
            ranks=Ranks(found.model.device),
            rows=rows,
        )
        for one in data
    ]
    figures = []
    for one, look in zip(data, looks, strict=True):
        watched = Watched(
            _name(one), lambda line: print(visible(line), file=sys.stderr, flush=True)
        )
        figures.append({"data": _name(one), **look(found.model, watched)})
    return figures


def _name(data: Data) -> str:
    if isinstance(data, Mixture):
        return ", ".join(source.name for source in data.sources)
    return data.name if isinstance(data, Source) else data


def _save(output: Path, figures: dict[str, Any]) -> None:
    """Write `results.json` atomically."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = output / "results.json.partial"
        partial.write_text(
            json_text(figures, output / "results.json", indent=1) + "\n", encoding="utf-8"
        )
        partial.replace(output / "results.json")
    except OSError as error:
        raise OutputError(
            f"{output}: cannot be written: {error.strerror}; give another folder"
        ) from error


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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Facts of an exported model."""

    output: str
    """The folder."""
    step: int | None
    """Steps that the model was trained for; None: unknown."""
    parameters: int
    context_length: int
    """Maximum number of tokens."""
    stop_ids: list[int]
    """Ids that end a text."""
    chat_template: bool
    """Whether the folder has a chat template."""
    notices: list[str]
    """Messages on what was left out, or cannot be read by other software."""
    base: str | None = None
    """Of an adapter: hub name or folder of the model that it belongs to; None: the whole model is
    exported.
    """


def export_run(
    run: RunFolder | str | Path,
    output: Path,
    context_length: int | None = None,
    *,
    overwrite: bool = False,
    adapter: bool = False,
) -> Exported:
    """Write a run's model with its tokenizer, chat template, stop ids and context length; LoRA is
    merged.

    With `adapter`, write its LoRA alone, in peft's format.

    Raises:
        OutputError: The folder holds an earlier export and `overwrite` is false, or other files, or
            cannot be written.
        ConfigError: The model cannot be written in the Hugging Face layout.
    """
    run = run if isinstance(run, RunFolder) else RunFolder.open(run)
    check_output(output, overwrite)
    tokenizer = load_tokenizer(run.tokenizer)
    length = context_length or context_of(run)
    trained = load_model(run.model, module=getattr(run, "module", None))
    template = None if run.template is None else template_of(run, tokenizer)
    if adapter and trained.lora is None:
        raise ConfigError(
            f"{run.path}: was not trained with LoRA, so it has no adapter; export it without "
            "adapter"
        )
    if trained.lora is not None and not adapter:
        merge_lora(trained)
    notices: tuple[str, ...] = ()
    base: str | None = None
    try:
        if adapter:
            # A model whose vocabulary grew is not the one that the run began with.
            grown = trained.new_rows is not None and trained.new_rows.grown
            base = None if grown else _base_name(run)
            parameters = export_adapter(
                trained,
                output,
                base=base,
                tokenizer=tokenizer,
                template=template,
                context_length=length,
                facts=run.facts,
                overwrite=overwrite,
            )
            notices = _adapter_notices(output, base)
            base = base or str(output / "base")
        else:
            notices = export(
                trained,
                output,
                tokenizer=tokenizer,
                template=template,
                processor=None if run.processor is None else load_processor(run.processor),
                stop_ids=run.stop_ids,
                context_length=length,
                facts=run.facts,
                overwrite=overwrite,
            )
            parameters = sum(weight.numel() for weight in trained.parameters())
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"{output}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from error
    return Exported(
        output=str(output),
        step=run.step,
        parameters=parameters,
        context_length=length,
        stop_ids=list(run.stop_ids),
        chat_template=run.template is not None,
        notices=list(notices),
        base=base,
    )


def _adapter_notices(output: Path, base: str | None) -> tuple[str, ...]:
    """How to load an adapter whose base is not named by a place that all machines know."""
    named = base_name(base)
    if named == base:
        return ()
    place = output / named if base is None else base
    notice = (
        f"adapter_config.json calls the base {named!r}, not by its place, which may change; "
        "load it so: "
        f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(place)!r}), "
        f"{str(output)!r})"
    )
    return (notice,)


def _base_name(run: RunFolder) -> str | None:
    """Hub name or folder of the model of transformers that a run began with; None: it was another
    one.
    """
    if run.step is None:
        return None
    _, values = read_yaml(run.path / RUN_FILE)
    model = (values or {}).get("model")
    return model.removeprefix("hf:") if isinstance(model, str) and model.startswith("hf:") else None
