"""What an install with the extra `train` does: some steps of training, and text; `check_package.py`
runs it.
"""

import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import penstock as ps

RUN = """\
data:
  sources: [{path: data}]
  loader: {sequence_length: 64, rows_per_step: 4}
model: {layers: 2, width: 16, heads: 2}
training: {steps: 4, threads: 1, device: cpu, optimizer: {learning_rate: 0.01}, schedule: {warmup_steps: 2}}
"""  # noqa: E501


def command(*words: str, folder: Path) -> str:
    """Run the installed `penstock` in a folder; its output."""
    program = Path(sys.executable).with_name("penstock")
    found = subprocess.run(
        [program, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, (
        f"penstock {' '.join(words)}: {found.stdout[-2000:]}{found.stderr[-2000:]}"
    )
    return found.stdout


def main() -> None:
    assert Path(ps.__file__).is_relative_to(sys.prefix), (
        f"penstock is imported from {ps.__file__}, not {sys.prefix}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = [f"water wheel {number} turns the mill" for number in range(100)]
        tokenizer = ps.train_tokenizer(
            texts, vocab_size=300, output=folder / "tokenizer", progress=False
        )
        ps.prepare(
            iter(texts), tokenizer=tokenizer, output=folder / "data", processes=1, progress=False
        )
        (folder / "run.yaml").write_text(RUN)
        command("train", "run.yaml", "--output", "run", folder=folder)
        written = command(
            "generate",
            "run",
            "--prompt",
            "water",
            "--max-tokens",
            "4",
            "--device",
            "cpu",
            folder=folder,
        )
        assert "water" in written, written
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert all(0 < loss < 20 for loss in losses), losses
    assert losses
    print(
        f"trained {len(losses)} logged steps on torch {metadata.version('torch')}, and wrote text"
    )


if __name__ == "__main__":
    main()
