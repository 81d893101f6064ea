"""SmolLM2 learns from Gemma 3, whose tokenizer is another: held-out bits per byte, against the student alone."""

from pathlib import Path
from typing import Any

import pytest
from peers import our_logits
from real_texts import prose, write_lines
from report import Report

import penstock as ps

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("plain_torch")]

STEPS, RATE, LENGTH = 8, 2e-5, 192
TRAINED = 24
"""Texts to learn from; the next eight are held out."""


@pytest.fixture(scope="module")
def texts(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dataset `train` and the file `held.jsonl`."""
    folder = tmp_path_factory.mktemp("texts")
    found = prose(700)
    write_lines(folder / "train.jsonl", found[:TRAINED])
    write_lines(folder / "held.jsonl", found[TRAINED : TRAINED + 8])
    ps.prepare(folder / "train.jsonl", tokenizer=smollm2, output=folder / "train", progress=False)
    return folder


def bits(model: Path | str, texts: Path) -> float:
    """Bits per byte of the held-out texts."""
    return float(ps.open_run(model).evaluate("bits_per_byte", data=str(texts / "held.jsonl"))["tasks"][0]["score"])


def their_bits(folder: Path, texts: Path) -> float:
    """The same by transformers, a text at a time, after the token that begins a text."""
    import json

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    nats, num_bytes = 0.0, 0
    for line in (texts / "held.jsonl").read_text(encoding="utf-8").splitlines():
        text = json.loads(line)["text"]
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        nats -= float(logs.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        num_bytes += len(text.encode())
    return nats / num_bytes / float(torch.tensor(2.0).log())


def test_bits_per_byte_are_those_of_transformers(smollm2: Path, gemma3: Path, texts: Path, report: Report) -> None:
    """So figures of two tokenizers can be compared at all."""
    found = {folder.name: (bits(folder, texts), their_bits(folder, texts)) for folder in (smollm2, gemma3)}
    for ours, theirs in found.values():
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert all(0.3 < ours < 2 for ours, _ in found.values())
    report.add(
        "bits per byte of held-out prose: SmolLM2; Gemma 3",
        "; ".join(f"{ours:.4f}" for ours, _ in found.values()),
        "transformers: equal to " + f"{max(abs(ours / theirs - 1) for ours, theirs in found.values()):.0e}",
    )


def test_a_teacher_with_another_tokenizer_helps(smollm2: Path, gemma3: Path, texts: Path, tmp_path: Path, report: Report) -> None:
    """The same student, texts and steps, with and without its teacher."""
    common: dict[str, Any] = {"steps": STEPS, "learning_rate": RATE, "progress": False, "weight_decay": 0.0}

    def loader() -> ps.Loader:
        return ps.Loader(texts / "train", sequence_length=LENGTH, rows_per_step=2, seed=1)

    ps.train(str(smollm2), loader(), output=tmp_path / "alone", **common)
    taught = ps.distil(
        str(smollm2), loader(), teacher=str(gemma3), loss="alm", output=tmp_path / "taught", **common
    )
    before, alone, after = (bits(one, texts) for one in (smollm2, tmp_path / "alone", tmp_path / "taught"))
    divergence = [record["distillation"] for record in taught.metrics]
    assert after < before - 0.005
    assert min(divergence) >= 0
    report.add(
        f"SmolLM2 distilled from Gemma 3 (`alm`), {STEPS} steps of {2 * LENGTH} tokens: held-out bits per byte",
        f"{before:.4f} → {after:.4f}",
        f"cross entropy alone, the same steps: {alone:.4f}",
    )
