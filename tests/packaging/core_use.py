"""What a plain install does, from text to rows; `check_package.py` runs it with the Python of a new
environment.

With `--brief` nothing that compiles kernels: public names, the command, and a tokenizer. With
`--shipped` nothing may be compiled, because the wheel brought all kernels.
"""

import json
import pkgutil
import subprocess
import sys
import tempfile
from importlib import import_module, metadata
from pathlib import Path

import penstock as ps

NEED_EXTRAS = (
    "models",
    "distillation",
    "generation",
    "evaluation",
    "training",
    "serving",
    "integrations",
    "runs",
)
"""Rooms of which names may need an extra; of all other rooms none may."""
ON_USE = (
    "penstock.plan.inputs.torch_tensors",
    "penstock.use.cli.used",
    "penstock.use.config.initial_models",
    "penstock.use.config.summary",
    "penstock.use.config.teacher_cache",
    "penstock.use.config.teachers",
    "penstock.use.config.training",
    "penstock.use.config.vocabularies",
)
"""Modules that their room imports only for who has torch; and the table of what verbs work with."""

TEXTS = [
    f"water wheel {number} turns the mill, and the river number {number % 7} flows"
    for number in range(300)
]


def check_installation() -> None:
    installed = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    unwanted = {
        name
        for name in installed
        if name.startswith(("torch", "nvidia", "cuda", "transformers", "jax"))
    }
    assert not unwanted, f"a plain install brought {sorted(unwanted)}"
    assert Path(ps.__file__).is_relative_to(sys.prefix), (
        f"penstock is imported from {ps.__file__}, not {sys.prefix}"
    )


def import_public_names() -> str:
    """Import all public names; those that need an extra must name its pip command."""
    doors = [
        module.name
        for module in pkgutil.walk_packages(ps.__path__, "penstock.", onerror=lambda _: None)
    ]
    usable, refused, wrong = 0, 0, []
    for door in ("penstock", *(door for door in doors if not door.endswith("__main__"))):
        may_need_extra = (
            door == "penstock" or set(door.split(".")[1:3]) & {*NEED_EXTRAS} or door in ON_USE
        )
        try:
            names = getattr(import_module(door), "__all__", [])
        except ImportError as error:
            # A module below a room is not public: what it imports at its top may be missing.
            wrong += [] if may_need_extra else [f"{door}: {error!r}"]
            continue
        for name in names:
            try:
                getattr(import_module(door), name)
                usable += 1
            except ps.errors.MissingExtraError as error:
                refused += 1
                # Other people's trainers are in no extra.
                cure = "pip install " if ".integrations." in door else "pip install 'penstock["
                if not (may_need_extra and cure in str(error)):
                    wrong.append(f"{door}.{name}: {error}")
    assert not wrong, "\n".join(wrong)
    return f"{usable} public names, {refused} more need an extra"


def command(*words: str) -> str:
    """Run the installed `penstock`; its output."""
    program = Path(sys.executable).with_name("penstock")
    found = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert found.returncode == 0, (
        f"penstock {' '.join(words)}: {found.stdout[-2000:]}{found.stderr[-2000:]}"
    )
    return found.stdout


def use_tokenizer(folder: Path) -> str:
    """Train a tokenizer and encode with it; who encoded."""
    tokenizer = ps.train_tokenizer(
        TEXTS, vocab_size=400, output=folder / "tokenizer", progress=False
    )
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    return f"encoded by {tokenizer.encoder}"


def use_data_path(folder: Path) -> str:
    """Prepare a small JSONL, iterate a loader, look at the dataset with the command; what made the
    kernels.
    """
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    from numba.core import event

    compilations = event.RecordingListener()
    event.register("numba:compile", compilations)
    dataset = ps.prepare(
        folder / "texts.jsonl",
        tokenizer=folder / "tokenizer",
        output=folder / "data",
        processes=1,
        progress=False,
    )
    assert (len(dataset), dataset.report.rejects) == (300, 0)
    loader = ps.Loader(dataset, sequence_length=128, rows_per_step=2, threads=1)
    steps = [next(steps) for steps in [iter(loader)] for _ in range(3)]
    for step in steps:
        for row in step:
            assert row.tokens.shape == (128,)
            assert (row.targets[row.loss_weights > 0] >= 0).all()
    assert "texts.jsonl" in command("inspect", str(folder / "data"))
    compiled = len(compilations.buffer) // 2
    assert not (compiled and "--shipped" in sys.argv), (
        f"{compiled} kernels were compiled, which the wheel brought"
    )
    return f"{compiled} kernels compiled by numba {metadata.version('numba')}"


def main() -> None:
    check_installation()
    names = import_public_names()
    assert "prepare" in command("--help")
    problems = json.loads(command("doctor", "--json"))["problems"]
    assert problems == [], problems
    with tempfile.TemporaryDirectory() as folder:
        done = [use_tokenizer(Path(folder))]
        done += ["brief"] if "--brief" in sys.argv else [use_data_path(Path(folder))]
    print("; ".join([names, *done]))


if __name__ == "__main__":
    main()
