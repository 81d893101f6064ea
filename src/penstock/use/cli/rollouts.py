"""`penstock rollouts`: sample answers from a model, judge them, and write a dataset that a policy
learns from.
"""

from pathlib import Path

import penstock as ps
from penstock.use.cli.declared_options import Option, options, takes
from penstock.use.cli.options import MODEL, OPENING, Given, Quiet


@takes(
    settings=(
        MODEL,
        options(
            "use.runs.run.Run.rollouts",
            prompts=Option(argument=True, metavar="PROMPTS", hint=Path),
            reward=Option(metavar="CODE"),
            environment=Option(metavar="CODE"),
            output=Option(metavar="FOLDER"),
            samples=Option(),
            version=Option(metavar="N"),
            max_turns=Option(),
            history=Option(),
            at_once=Option(),
        ),
        options(
            "use.runs.remote_sampler.RemoteEngine",
            panel="Another engine",
            engine=Option(metavar="URL", required=False),
            engine_model=Option(metavar="NAME"),
            engine_logprobs=Option(),
            engine_seconds=Option(),
        ),
        options(
            "learn.generation.settings.Sampling",
            "max_tokens",
            "seed",
            temperature=Option(default="1"),
        ),
        OPENING,
    )
)
def run(*, settings: Given, quiet: Quiet = False) -> None:
    r"""Sample several answers to each prompt, judge them with your function, and write them as a
    dataset. With --environment, an answer is a conversation of several turns, and --engine names a
    server that samples it.

    Train on it with training.policy; temperature and the log-probability of each sampled token are
    stored with it.

    Example:
        penstock rollouts runs/first prompts.jsonl --reward rewards.py:shorter \
            --samples 4 --max-tokens 32 -o data/rollouts
    """
    output = settings["output"]
    found = ps.open_run(settings.pop("model")).rollouts(**settings, progress=not quiet)
    print(f"{output}: {found}")
    for prompt, answer, judged in found.examples:
        print(f"  {judged:g}  {prompt!r:.60} → {answer!r:.60}")
