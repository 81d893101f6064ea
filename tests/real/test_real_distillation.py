"""SmolLM2 learns from Gemma 3, whose tokenizer is another: held-out bits per byte, against the
student alone.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from real_report import Report, to
from real_texts import GERMAN, write_lines

import penstock as ps

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("plain_torch"),
]

STEPS, RATE, LENGTH = 5, 3e-5, 192
TRAINED = 16
"""Texts to learn from; the others are held out. They are German, which SmolLM2 has hardly seen and
Gemma knows.
"""


@pytest.fixture(scope="module")
def texts(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dataset `train` and the file `held.jsonl`."""
    folder = tmp_path_factory.mktemp("texts")
    found = GERMAN.read_text(encoding="utf-8").splitlines()
    write_lines(folder / "train.jsonl", found[:TRAINED])
    write_lines(folder / "held.jsonl", found[TRAINED:])
    ps.prepare(folder / "train.jsonl", tokenizer=smollm2, output=folder / "train", progress=False)
    return folder


def bits(model: Path | str, texts: Path) -> float:
    """Bits per byte of the held-out texts."""
    return float(
        ps.open_run(model).evaluate("bits_per_byte", data=str(texts / "held.jsonl"))["tasks"][0][
            "score"
        ]
    )


def their_bits(folder: Path, texts: Path) -> float:
    """The same by transformers, a text at a time; a first token before which there is no BOS is not
    predicted.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    nats, num_bytes = 0.0, 0
    for line in (texts / "held.jsonl").read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        nats -= float(logs.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        unseen = "" if ids[0] == tokenizer.bos_token_id else tokenizer.decode(ids[:1])
        num_bytes += len(text.encode()) - len(unseen.encode())
    return nats / num_bytes / math.log(2)


def test_bits_per_byte_are_those_of_transformers(
    smollm2: Path, gemma3: Path, texts: Path, report: Report
) -> None:
    """So figures of two tokenizers can be compared at all."""
    found = {
        folder.name: (bits(folder, texts), their_bits(folder, texts))
        for folder in (smollm2, gemma3)
    }
    for ours, theirs in found.values():
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert found["gemma3"][0] < found["smollm2"][0] - 0.5
    report.add(
        "bits per byte of German prose: SmolLM2; Gemma 3",
        "; ".join(f"{ours:.4f}" for ours, _ in found.values()),
        f"transformers: equal {to(max(abs(ours / theirs - 1) for ours, theirs in found.values()))}",
    )


def test_a_teacher_with_another_tokenizer_helps(
    smollm2: Path, gemma3: Path, texts: Path, tmp_path: Path, report: Report
) -> None:
    """The same student, texts and steps: without a teacher, with it, and from it alone."""
    common: dict[str, Any] = {
        "steps": STEPS,
        "learning_rate": RATE,
        "progress": False,
        "weight_decay": 0.0,
    }

    def loader() -> ps.Loader:
        return ps.Loader(texts / "train", sequence_length=LENGTH, rows_per_step=2, seed=1)

    ps.train(str(smollm2), loader(), output=tmp_path / "alone", **common)
    for name, weight in {"both": 1.0, "teacher": 0.0}.items():
        run = ps.distill(
            str(smollm2),
            loader(),
            teacher=str(gemma3),
            loss="alm",
            cross_entropy=weight,
            output=tmp_path / name,
            **common,
        )
        assert min(record["distillation"] for record in run.metrics) >= 0
    before, alone, both, teacher = (
        bits(one, texts)
        for one in (smollm2, *(tmp_path / name for name in ("alone", "both", "teacher")))
    )
    assert teacher < before - 0.05
    assert both < alone < before
    report.add(
        f"SmolLM2 learns German from Gemma 3, which has another tokenizer (`alm`), {STEPS} "
        f"steps of {2 * LENGTH}: held-out bits per byte with cross entropy and teacher; with "
        "the teacher alone",
        f"{before:.3f} → {both:.3f}; {teacher:.3f}",
        f"cross entropy alone, the same steps: {alone:.3f}",
    )
