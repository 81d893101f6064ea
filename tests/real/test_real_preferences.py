"""DPO of a real chat model against TRL's DPOTrainer: the first steps' losses, rewards and
margins.
"""

from pathlib import Path
from typing import Any

import pytest
from real_report import Report, to
from real_texts import CRAFTS, craft_pairs

import penstock as ps

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("plain_torch"),
]

STEPS, RATE, BETA, DECAY = 3, 1e-5, 0.1, 0.0
PAIRS = 6
NAMES = {
    "loss": "loss",
    "preference.chosen_reward": "rewards/chosen",
    "preference.rejected_reward": "rewards/rejected",
    "preference.margin": "rewards/margins",
    "preference.accuracy": "rewards/accuracies",
}
"""Our figures → TRL's."""


@pytest.fixture(scope="module")
def pairs(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of pairs as trees."""
    folder = tmp_path_factory.mktemp("pairs") / "pairs"
    ps.prepare(
        craft_pairs(CRAFTS[:PAIRS]),
        tokenizer=smollm2,
        template="auto",
        answers="tree",
        output=folder,
        progress=False,
    )
    return folder


def plain_texts(tokenizer: Any, record: dict[str, Any]) -> dict[str, str]:
    """A pair as texts, to which TRL adds the token that ends a reply."""
    prompt = tokenizer.apply_chat_template(
        record["prompt"], tokenize=False, add_generation_prompt=True
    )
    return {
        "prompt": prompt,
        **{side: record[side][0]["content"] for side in ("chosen", "rejected")},
    }


def train_trl(model: Path, pairs: Path, output: Path) -> list[dict[str, float]]:
    """TRL's figures of each step, with all pairs in one batch; it makes their ids itself."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(
        str(output),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=STEPS,
        per_device_train_batch_size=PAIRS,
        max_length=None,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=DECAY,
        adam_beta2=0.95,
        beta=BETA,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [plain_texts(tokenizer, record) for record in craft_pairs(CRAFTS[:PAIRS])]
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=args,
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
    )
    for mine, other in zip(ps.trl.preference_pairs(pairs), trainer.train_dataset, strict=True):
        assert {name: other[name] for name in mine} == mine
    trainer.train()
    return [log for log in trainer.state.log_history if "rewards/margins" in log]


def test_first_steps_are_those_of_trl(
    smollm2: Path, pairs: Path, tmp_path: Path, report: Report
) -> None:
    """All pairs are in each step, as trees here, and padded there."""
    loader = ps.Loader(pairs, sequence_length=160, rows_per_step=PAIRS, packing="none", seed=1)
    run = ps.train(
        str(smollm2),
        loader,
        steps=STEPS,
        learning_rate=RATE,
        schedule="constant",
        warmup_steps=0,
        weight_decay=DECAY,
        preference={"kind": "dpo", "beta": BETA},
        output=tmp_path / "run",
        progress=False,
    )
    theirs = train_trl(smollm2, pairs, tmp_path / "trl")
    ours = [{name: record[name] for name in NAMES} for record in run.metrics]
    expected = [{mine: step[name] for mine, name in NAMES.items()} for step in theirs]
    assert len(ours) == len(expected) == STEPS
    for mine, other in zip(ours, expected, strict=True):
        assert mine == pytest.approx(other, rel=2e-3, abs=2e-4)
    margin = "preference.margin"
    assert ours[-1][margin] > ours[0][margin] + 0.1
    worst = max(
        abs(mine["loss"] - other["loss"]) for mine, other in zip(ours, expected, strict=True)
    )
    report.add(
        f"DPO of SmolLM2 on {PAIRS} pairs, {STEPS} steps: losses; margins",
        "; ".join(", ".join(f"{step[name]:.4f}" for step in ours) for name in ("loss", margin)),
        f"TRL's `DPOTrainer`, padded: losses equal {to(worst)}",
    )


def test_ids_are_those_of_trl(smollm2: Path, pairs: Path, tmp_path: Path) -> None:
    """TRL renders the same records itself; it also trains the line end after a reply, which nobody
    has to generate.
    """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    args = DPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_length=None
    )
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(smollm2), args=args, processing_class=tokenizer,
        train_dataset=Dataset.from_list(craft_pairs(CRAFTS[:PAIRS])),
    )  # fmt: skip
    line_end = tokenizer("\n")["input_ids"]
    for mine, other in zip(ps.trl.preference_pairs(pairs), trainer.train_dataset, strict=True):
        assert mine["prompt_ids"] == other["prompt_ids"]
        for side in ("chosen_ids", "rejected_ids"):
            assert mine[side] + line_end == other[side]
