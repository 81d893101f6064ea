"""`Run`: a trained model in its folder, with methods to generate, evaluate, serve, export, plot and
resume.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, final, overload

from penstock.chat.trajectories.trajectory import History
from penstock.core.errors import ConfigError
from penstock.core.json_values import JsonMapping, JsonObject
from penstock.core.notebook import card, curve
from penstock.core.suggestions import suggests
from penstock.data.shards.dataset import Dataset
from penstock.data.shards.tables.corpus import Corpus
from penstock.learn.evaluation.tasks import TaskSettings
from penstock.learn.generation.session import ChatSession
from penstock.learn.training.curve_picture import plot_runs
from penstock.learn.training.curves import Over, View
from penstock.learn.training.metrics import METRICS, read_metrics
from penstock.learn.training.path_settings import REFERENCE_COLUMN
from penstock.learn.training.run_folder import RunFolder
from penstock.plan.loader.loader import Loader
from penstock.plan.loader.mixture import Mixture, Source
from penstock.use.runs.episodes import AT_ONCE, EpisodeSettings
from penstock.use.runs.evaluating import evaluate_run
from penstock.use.runs.exporting import export_run
from penstock.use.runs.generating import (
    SampledText,
    open_session,
    sample_episodes,
    sample_rollouts,
    sample_texts,
    stream_text,
    write_replies,
)
from penstock.use.runs.keywords import (
    EvaluateKeywords,
    GenerateKeywords,
    OpeningKeywords,
    ServeKeywords,
    TrainKeywords,
    WriteKeywords,
)
from penstock.use.runs.opening import Opened, load_opened
from penstock.use.runs.reference import cache_reference
from penstock.use.runs.remote_sampler import LogProbabilityKind, RemoteEngine
from penstock.use.runs.serving import serve
from penstock.use.runs.starting import resume

if TYPE_CHECKING:
    import torch

    from penstock.chat import Template
    from penstock.use.runs.exporting import Exported
    from penstock.use.runs.rollouts import Rollouts


@final
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Run(RunFolder):
    """A run's folder at its newest complete checkpoint, or a model in the Hugging Face layout.

    ```python
    run = ps.open_run("runs/a")
    run.generate("def ", max_tokens=64)
    run.evaluate("gsm8k", limit=100)["tasks"]
    run.metrics[-1]["loss"]
    ```
    """

    module: "torch.nn.Module | None" = field(default=None, compare=False)
    """Your own torch module, into which the weights are loaded; None: the run describes its
    model.
    """
    _opened: dict[Any, Opened] = field(default_factory=dict, compare=False, init=False)

    def __repr__(self) -> str:
        step = "a model of transformers" if self.step is None else f"{self.step:,} steps"
        length = "" if self.trained_length is None else f", rows of {self.trained_length:,}"
        return (
            f"Run({str(self.path)!r}: "
            f"{step}{length}{', chats' if self.template is not None else ''})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: where the run is, its last figures, and the curve of its loss."""
        facts: list[tuple[str, object]] = [
            ("folder", self.path),
            ("chats", "yes" if self.template else "no"),
        ]
        if self.step is None:
            return card("Model in the Hugging Face layout", facts)
        # A run without its metrics, such as a copy of its checkpoints, is a run all the same.
        found = self.metrics if (self.path / METRICS).is_file() else []
        steps = [record for record in found if "loss" in record]
        facts += [
            ("steps", f"{self.step:,}"),
            ("tokens in a row", self.trained_length or "unknown"),
        ]
        if steps:
            facts += [
                ("loss", f"{steps[-1]['loss']:.4f}"),
                ("learning rate", f"{steps[-1]['learning_rate']:.3g}"),
            ]
        losses = [record["loss"] for record in steps]
        return card("Run", facts, *([curve(losses, "loss of each step")] if losses else []))

    @property
    def metrics(self) -> list[JsonObject]:
        """The figures of each step, in order; see `Trainer.train` for their names.

        Raises:
            FormatError: There are none, as for a model of transformers.
        """
        return read_metrics(self.path)

    def _open_model(self, options: OpeningKeywords) -> Opened:
        """Open the model; it stays open for the next call with the same options."""
        key = tuple(sorted(options.items()))
        if key not in self._opened:
            self._opened.clear()
            self._opened[key] = load_opened(self, **options, module=self.module)
        return self._opened[key]

    @overload
    def generate(self, prompt: str = "", **settings: Unpack[WriteKeywords]) -> str: ...
    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], **settings: Unpack[WriteKeywords]
    ) -> list[str]: ...
    def generate(
        self, prompt: str | list[str] | tuple[str, ...] = "", **settings: Unpack[WriteKeywords]
    ) -> str | list[str]:
        """Generate texts; prompts are not included in them.

        Args:
            prompt: One prompt, or several, which are generated together.
            settings: See `Sampling` (temperature 0.8 by default), `Unmasking` for diffusion, and
                context_length, device, threads.

        Returns:
            The text; for several prompts a list.

        Raises:
            ConfigError: A setting is unknown or out of range, or a prompt fills the context.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        written = sample_texts("Run.generate", self._open_model, prompts, 1, dict(settings))
        return written[0].text if isinstance(prompt, str) else [one.text for one in written]

    def stream(self, prompt: str = "", **settings: Unpack[WriteKeywords]) -> Iterator[str]:
        """Generate a text piece by piece, as its words become certain.

        Args:
            prompt: The prompt, which is not included.
            settings: As for `generate`.

        Raises:
            ConfigError: As for `generate`.
        """
        return stream_text(self._open_model, prompt, dict(settings))

    def sample(
        self,
        prompts: str | Sequence[str],
        *,
        samples: int = 1,
        **settings: Unpack[WriteKeywords],
    ) -> list[SampledText]:
        """Generate texts, each with its tokens, its seed and why it ended.

        Args:
            prompts: One prompt, or several, which are generated together.
            samples: Texts of each prompt, with seeds that count up from `seed`.
            settings: As for `generate`.

        Returns:
            The texts of the first prompt, then those of the next.

        Raises:
            ConfigError: As for `generate`, or `samples` is less than 1.
        """
        if samples < 1:
            raise ConfigError(f"Run.sample: samples must be 1 or more, got {samples}")
        prompts = [prompts] if isinstance(prompts, str) else prompts
        return sample_texts("Run.sample", self._open_model, prompts, samples, dict(settings))

    def session(
        self,
        *,
        system: str | None = None,
        template: "str | Path | Template | None" = None,
        **settings: Unpack[GenerateKeywords],
    ) -> ChatSession:
        """A conversation that goes on: each reply is streamed, and the oldest turns are dropped
        where the context is full.

        ```python
        session = run.session(system="You are brief.")
        for piece in session.reply("Who wrote Walden?"):
            print(piece, end="")
        ```

        Args:
            system: The system message.
            template: A chat template in place of the model's own.
            settings: As for `generate`.

        Raises:
            ConfigError: The model has no chat template, or a setting is unknown or out of range.
        """
        return open_session(self._open_model, system, template, dict(settings))

    @overload
    def chat(
        self, messages: str | Sequence[JsonMapping], **settings: Unpack[WriteKeywords]
    ) -> str: ...
    @overload
    def chat(
        self,
        messages: list[str] | Sequence[Sequence[JsonMapping]],
        **settings: Unpack[WriteKeywords],
    ) -> list[str]: ...
    def chat(self, messages: Any, **settings: Unpack[WriteKeywords]) -> str | list[str]:
        """The assistant's reply to a message or a conversation, or to each of several.

        Args:
            messages: The user's message, or messages with role and content, the last one the
                user's; or a list of such, which are answered together, each as it would be alone.
            settings: As for `generate`.

        Returns:
            The text of the reply; for a list of messages or conversations a list.

        Raises:
            ConfigError: The run has no chat template, `messages` are none, or a setting is unknown
                or out of range.
            ConversationError: The last message does not fit the context. Of several conversations,
                the error says which.
        """
        return write_replies(self._open_model, messages, dict(settings))

    def rollouts(
        self,
        prompts: str | Path | Sequence[str | JsonMapping],
        reward: Callable[..., float] | str | None = None,
        *,
        output: str | Path,
        environment: Callable[..., Any] | str | None = None,
        samples: int = 8,
        version: int | None = None,
        tools: Sequence[JsonMapping] | None = None,
        max_turns: int = 16,
        history: History = "sampled",
        at_once: int = AT_ONCE,
        engine: str | None = None,
        engine_model: str | None = None,
        engine_logprobs: LogProbabilityKind = "raw",
        engine_seconds: float = 600.0,
        progress: bool = True,
        **settings: Unpack[GenerateKeywords],
    ) -> "Rollouts":
        """Sample several answers to each prompt, judge them, and write them as a dataset for
        `training.policy`. An answer is a text, or with an environment a conversation of several
        turns: a trajectory.

        Args:
            prompts: Texts, which go on as they are, without the chat template (with an environment,
                each is a message of the user); or records with `prompt` or `messages`, and what the
                reward needs besides; or the path of a file of such records.
            reward: Function of (record, answer) that gives a number, or its name. With a parameter
                `finish_reason` it is told why the answer ended: stop or length.
            output: A new folder for the dataset.
            environment: In place of a reward: function of (messages, reply) that gives the next
                messages, or a number where it is over, or its name (`use.runs.environments`).
                Trajectories that are over are kept in `OUTPUT.jsonl`; a stopped call goes on.
            samples: Answers to each prompt.
            version: Version of the policy that samples, stored with each token as the column
                `policy_version`, which `policy.max_staleness` reads; None: not stored.
            tools: With an environment: JSON schemas of functions that the template shows.
            max_turns: With an environment: replies of a trajectory, at most.
            history: With an environment: how prompts go on, as for `ps.chat.Trajectory`.
            at_once: With an environment: trajectories at the same time, at most.
            engine: With an environment: URL of a server that samples, without this run's weights;
                see `RemoteEngine`.
            engine_model: Name of the model there; None: the only one.
            engine_logprobs: Its log-probabilities: raw, or processed.
            engine_seconds: Maximum time for a reply, and for trying again while it is away.
            progress: Show progress.
            settings: As for `generate`; temperature is 1 by default. A policy refuses answers that
                were filtered (top_k, top_p, …) unless it is told to accept them.

        Returns:
            The dataset, the mean reward, and a few examples.

        Raises:
            ConfigError: A setting is unknown or out of range, or a reward is no finite number.
            RecordError: A prompt is missing, or fills the context.
            StateError: `OUTPUT.jsonl` is of other prompts or settings.
        """
        if (reward is None) == (environment is None):
            raise ConfigError(
                "Run.rollouts: give a reward, for answers of one turn, or an environment, for "
                "several turns"
            )
        server = RemoteEngine.of(engine, engine_model, engine_logprobs, engine_seconds)
        if environment is not None:
            how = EpisodeSettings(
                samples=samples,
                max_turns=max_turns,
                tools=tools,
                history=history,
                version=version,
                at_once=at_once,
            )
            given = (prompts, environment, output, how, server, progress, dict(settings))
            return sample_episodes(self, self._open_model, *given)
        if server or (tools, max_turns, history, at_once) != (None, 16, "sampled", AT_ONCE):
            raise ConfigError(
                "Run.rollouts: tools, max_turns, history, at_once and engine need an environment; "
                "leave them out"
            )
        return sample_rollouts(
            self._open_model, prompts, reward, output, samples, version, progress, dict(settings)
        )

    def reference(
        self,
        data: str | Path | Dataset,
        output: str | Path,
        *,
        column: str = REFERENCE_COLUMN,
        device: str = "auto",
        threads: int | None = None,
        progress: bool = True,
    ) -> Dataset:
        """Write a copy of a dataset with the log-probability that this model gives each target.

        Train on it with `preference={"reference": "cached"}`, without a second model in memory.

        Args:
            data: A prepared dataset.
            output: A new folder.
            column: `reference_log_probabilities`, which `reference: cached` reads; or
                `trainer_log_probabilities`, which policies read as those of the model that sampled
                the answers.
            device: cpu, cuda, …; auto: a GPU if there is one.
            threads: Torch's threads on the CPU; None: unchanged.
            progress: Show a bar.

        Raises:
            ConfigError: The model cannot process prefix trees, or knows too few ids; or there is no
                such column.
            OutputError: The folder is not empty, or cannot be written.
        """
        how: JsonObject = {"device": device, "threads": threads, "progress": progress}
        return cache_reference(self.path, data, output, column=column, **how)

    def evaluate(
        self,
        *what: str | Path | Corpus | Source | Mixture | TaskSettings,
        output: str | Path | None = None,
        rows: int | None = None,
        worst: int = 0,
        **settings: Unpack[EvaluateKeywords],
    ) -> JsonObject:
        """Measure the model: its scores on tasks, and its loss on held-out data.

        Args:
            what: Names of tasks (mmlu, gsm8k, humaneval, …, lm-eval:NAME), or their settings, to
                have other ones for each; datasets, also by folder, glob or URL; sources, mixtures.
            output: Save answers and results.json in this folder, and continue from them; results of
                other tasks and datasets of the same model stay in it.
            rows: Approximate number of rows to use of each dataset; None: all.
            worst: Name this many documents of each dataset, those with the highest loss a target.
            settings: See `TaskSettings`, and context_length, device, threads. Each named task takes
                those that have a meaning for it.

        Returns:
            `results`, the losses (by source, task and prediction head if there are several), with
            `accuracy` and `worst.1`, … if `worst` is given; `tasks`, the scores.

        Raises:
            ConfigError: There is no such task or dataset, it does not fit the model, or a setting
                has no meaning for any task.
            StateError: The folder has results of another model, or the model's outputs are NaN.
        """
        place = None if output is None else Path(output)
        return evaluate_run(self._open_model, what, place, rows, worst, dict(settings))

    def serve(self, *, name: str | None = None, **settings: Unpack[ServeKeywords]) -> None:
        """Serve the model over the OpenAI API, until SIGTERM or Ctrl-C.

        Args:
            name: The model's id; None: the name of the folder.
            settings: See `ServeSettings`, and context_length, device, threads.

        Raises:
            ConfigError: A setting is unknown or out of range.
            MissingExtraError: The extra `serve` is not installed.
        """
        serve(self._open_model, name, dict(settings))

    def export(
        self,
        output: str | Path,
        *,
        context_length: int | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        overwrite: bool = False,
        adapter: bool = False,
    ) -> "Exported":
        """Write the model as a folder that transformers, vLLM and llama.cpp read; LoRA is merged.

        Args:
            output: A folder, new or empty.
            context_length: Maximum number of tokens; None: that of the base, or, of a model without
                one, the training length.
            dtype: Dtype of the written weights, such as bfloat16 for half the size of float32;
                None: as trained.
            overwrite: Replace an earlier export in the folder; other files there are kept.
            adapter: Write the LoRA alone, as peft and vLLM read it; its base too, unless the run
                began with hf:NAME.

        Raises:
            OutputError: The folder holds an earlier export and `overwrite` is false, or other
                files, or cannot be written.
            ConfigError: The model is a module of your own, or `adapter` is set and it has no LoRA,
                or a weight is too large for `dtype`.
        """
        return export_run(
            self, Path(output), context_length, dtype=dtype, overwrite=overwrite, adapter=adapter
        )

    def plot(
        self,
        output: str | Path | None = None,
        *,
        over: Over = "step",
        compare: Sequence["Run | str | Path"] = (),
        smoothing: float = 0.01,
        log_x: bool = False,
        log_y: bool = False,
    ) -> Path:
        """Draw loss, throughput, learning rate and evaluations.

        Args:
            output: A page (.html) or a picture (.png, needs matplotlib); None: curves.html in the
                run's folder.
            over: step, or tokens.
            compare: Other runs, or their folders, to draw on the same axes.
            smoothing: Share of the horizontal axis after which a value weighs half in the smoothed
                curve; 0: none.
            log_x: Logarithmic horizontal axis.
            log_y: Logarithmic vertical axes.

        Raises:
            ConfigError: The suffix is another one, or there is nothing to draw.
        """
        paths = [run.path if isinstance(run, Run) else run for run in (self, *compare)]
        view = View(smoothing=smoothing, log_x=log_x, log_y=log_y)
        return plot_runs(paths, output, over=over, view=view)

    def resume(
        self,
        *,
        model: object = None,
        loader: Loader | None = None,
        progress: bool = True,
        **settings: Unpack[TrainKeywords],
    ) -> "Run":
        """Continue training from the newest checkpoint, with the settings of the folder.

        Args:
            model: The model; needed if it was your own module. None: the run's model.
            loader: The loader; needed if its sources had objects. None: made from the section
                `data` of the run.
            progress: Show progress.
            settings: Settings to change, such as steps; as for `ps.train`.

        Raises:
            ConfigError: The run had an object that is not given again.
            StateError: Data, plan, model or optimizer differ from the checkpoint's.
        """
        module = resume(self, self.module, model, loader, settings, progress)
        return open_run(self.path, module=module)


@suggests
def open_run(path: str | Path, *, module: "torch.nn.Module | None" = None) -> Run:
    """The newest complete checkpoint of a run, or a model in the Hugging Face layout.

    Args:
        path: The folder, or the name of a model on the Hugging Face hub.
        module: Your own torch module, into which the run's weights are loaded; needed if the run
            names no code that makes the module.

    Raises:
        FormatError: The folder is neither, or has no complete checkpoint yet; or the hub has
            nothing by that name.
        CorruptionError: The run file is damaged.
        MissingExtraError: It is a name on the hub, and huggingface_hub is not installed.
    """
    found = RunFolder.open(path)
    values = {name: getattr(found, name) for name in RunFolder.__dataclass_fields__}
    return Run(**values, module=module)
