"""Fine-tuning a real chat model, all weights and LoRA, against plain loops of transformers and
peft; exports reload.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from real_report import Report, to
from real_texts import CRAFTS, craft_chats
from their_side import (
    borrow_model,
    chats_of_steps,
    furthest,
    labelled,
    our_logits,
    their_logits,
    their_loss,
    train_theirs,
)

import penstock as ps

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("plain_torch"),
]

STEPS, RATE = 4, 2e-5
TRAINED, HELD = CRAFTS[:12], CRAFTS[12:]
OWN = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
"""Defaults of sampling that the base's folder gives."""


@pytest.fixture(scope="module")
def base(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with defaults of sampling of its own."""
    folder = borrow_model(smollm2, tmp_path_factory.mktemp("base") / "smollm2")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | OWN))
    return folder


@pytest.fixture(scope="module")
def data(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets `train` and `held`."""
    folder = tmp_path_factory.mktemp("data")
    for name, crafts in {"train": TRAINED, "held": HELD}.items():
        ps.prepare(
            craft_chats(crafts),
            tokenizer=base,
            template="auto",
            output=folder / name,
            progress=False,
        )
    return folder


def loader_of(data: Path) -> ps.Loader:
    return ps.Loader(data / "train", sequence_length=192, rows_per_step=2, seed=1)


def tune(base: Path, data: Path, output: Path, **settings: Any) -> ps.Run:
    """A run without weight decay, at a constant rate."""
    return ps.train(
        str(base),
        loader_of(data),
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        output=output,
        evaluators={"held": {"data": str(data / "held"), "every": 1}},
        progress=False,
        **settings,
    )


@pytest.fixture(scope="module")
def tuned(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> ps.Run:
    """All weights, after some steps."""
    return tune(
        base, data, tmp_path_factory.mktemp("tuned") / "run", steps=STEPS, learning_rate=RATE
    )


@pytest.fixture(scope="module")
def adapted(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> ps.Run:
    """LoRA, after some steps."""
    output = tmp_path_factory.mktemp("adapted") / "run"
    return tune(base, data, output, steps=6, learning_rate=1e-3, lora={"rank": 8, "alpha": 16})


def figures(run: ps.Run, name: str) -> list[float]:
    return [record[name] for record in run.metrics if name in record]


def load_theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


def load_chats(base: Path, crafts: Any) -> list[Any]:
    """Chats with labels as transformers encodes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    return [labelled(tokenizer, record["messages"]) for record in craft_chats(crafts)]


def test_first_losses_are_those_of_a_plain_loop(
    base: Path, data: Path, tuned: ps.Run, report: Report
) -> None:
    """Transformers has each chat alone; here they share rows."""
    known = {tuple(ids): (ids, labels) for ids, labels in load_chats(base, TRAINED)}
    steps = [
        [known[ids] for ids in documents] for documents in chats_of_steps(loader_of(data), STEPS)
    ]
    model = load_theirs(base)
    expected, ours = train_theirs(model, steps, learning_rate=RATE), figures(tuned, "loss")
    assert ours == pytest.approx(expected, rel=1e-3)
    assert ours[0] == pytest.approx(expected[0], rel=1e-5)
    assert max(expected) > 1.2 * min(expected)
    held = figures(tuned, "held/loss")
    assert held[-1] == pytest.approx(their_loss(model, load_chats(base, HELD)), rel=1e-3)
    worst = max(abs(mine - other) / other for mine, other in zip(ours, expected, strict=True))
    report.add(
        f"fine-tuning SmolLM2, all weights, {STEPS} steps of {len(steps[0])} chats: losses; "
        "held out",
        f"{', '.join(f'{loss:.4f}' for loss in ours)}; {held[0]:.3f} → {held[-1]:.3f}",
        f"a loop of transformers, a chat at a time: equal {to(worst)}",
    )


def test_it_learns_what_generalises(tuned: ps.Run, adapted: ps.Run) -> None:
    for run in (tuned, adapted):
        held = figures(run, "held/loss")
        assert held[-1] < held[0] - 0.1


def test_an_export_is_the_model(base: Path, tuned: ps.Run, tmp_path: Path, report: Report) -> None:
    """In transformers and back here; tokenizer, template and defaults of sampling come along."""
    from transformers import AutoTokenizer, GenerationConfig

    folder = tmp_path / "export"
    tuned.export(folder)
    (ids, _), *_ = load_chats(base, HELD)
    ours, theirs = our_logits(tuned.path, ids), their_logits(load_theirs(folder), ids)
    assert furthest(ours, theirs) < 2e-4
    assert furthest(our_logits(folder, ids), ours) == 0
    assert furthest(their_logits(load_theirs(base), ids), ours) > 0.1
    found, kept = GenerationConfig.from_pretrained(folder), GenerationConfig.from_pretrained(base)
    names = (*OWN, "bos_token_id", "pad_token_id")
    assert {name: getattr(found, name) for name in names} == {
        name: getattr(kept, name) for name in names
    }
    assert found.eos_token_id == [
        kept.eos_token_id
    ]  # one, or a list of them, is the same to transformers
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = craft_chats(HELD)[0]["messages"]
    assert tokenizer.apply_chat_template(chat)["input_ids"] == ids
    report.add(
        "exports of the fine-tuned model, opened by transformers",
        f"logits equal {to(furthest(ours, theirs))}; `generation_config.json` and chat "
        "template kept",
        "`AutoModelForCausalLM` against the run",
    )


def test_an_adapter_is_that_of_peft(
    base: Path, adapted: ps.Run, tmp_path: Path, report: Report
) -> None:
    """peft's logits with the adapter, transformers' with it merged, and ours; and the held-out
    loss.
    """
    from peft import PeftModel

    adapted.export(tmp_path / "adapter", adapter=True)
    adapted.export(tmp_path / "merged")
    theirs = PeftModel.from_pretrained(load_theirs(base), tmp_path / "adapter").eval()
    held = load_chats(base, HELD)
    ids = held[0][0]
    ours, merged = (
        our_logits(adapted.path, ids),
        their_logits(load_theirs(tmp_path / "merged"), ids),
    )
    apart = furthest(ours, their_logits(theirs, ids))
    assert apart < 2e-4
    assert furthest(merged, ours) < 1e-3
    with theirs.disable_adapter():
        assert furthest(their_logits(theirs, ids), ours) > 0.1
    losses = figures(adapted, "held/loss")
    assert losses[-1] == pytest.approx(their_loss(theirs, held), rel=1e-4)
    report.add(
        f"LoRA of rank 8 on SmolLM2, {adapted.step} steps: held-out loss; the exported adapter",
        f"{losses[0]:.3f} → {losses[-1]:.3f}; logits equal {to(apart)}",
        "peft with the adapter: the same held-out loss",
    )
