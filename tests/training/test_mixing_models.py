"""Models that let the documents of a row see each other, in training and in what is measured
meanwhile: refused in rows of several documents, right in rows of one.
"""

import copy
import json
import math
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_makers import LENGTH, make, train, values

from makers.models import tiny_huggingface
from penstock import load_tokenizer, open_dataset
from penstock.core.errors import IsolationError, PenstockError
from penstock.learn.distillation.teacher_rows import TeacherText
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.held_out_loss import ONE_A_ROW, HeldOutLoss
from penstock.models import PackedRows
from penstock.models.recurrent.borders import document_batches
from penstock.models.saving import load_model
from penstock.use.config import load_run
from penstock.use.config.summary import describe
from penstock.use.config.teacher_cache import cache_teacher
from penstock.use.config.teachers import packed_rows

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("plain_torch")
ALIBI: tuple[str, dict[str, Any]] = ("bloom", {})
"""Its positions are places in the row, whatever the documents are."""
MAMBA = ("mamba", {"state_size": 4})
RWKV = ("rwkv", {"attention_hidden_size": 32})
ONE_STEP = ("training.steps=1", "training.schedule.warmup_steps=1")
DYNAMIC = (
    "llama",
    {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        "max_position_embeddings": 24,
    },
)


LONGROPE = ("llama", {"rope_parameters": {
    "rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 24, "rope_theta": 10000.0}})  # fmt: skip
"""Documents of more than 24 tokens, which a row of 64 slots can hold, change the others."""


@pytest.fixture
def mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models run rows of several documents as transformers does, and in no other way."""
    monkeypatch.setattr("penstock.models.theirs.packed_ways.TRIED", ("own",))


def make_folder(folder: Path, kind: str, extra: dict[str, Any]) -> Path:
    tiny_huggingface(
        kind, **{"vocab_size": 400, "max_position_embeddings": LENGTH, **extra}
    ).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("mixing")
@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (
            ALIBI,
            (
                r"BloomForCausalLM \(bloom, .*documents of one row see each other: logits of "
                r"document \d of 3 differ"
            ),
        ),
        (MAMBA, r"MambaForCausalLM \(mamba, .*packing='none'"),
        (
            DYNAMIC,
            rf"rotary embedding \(dynamic\) changes .* more than 24 tokens, and rows have {LENGTH}",
        ),
    ],
    ids=["alibi", "mamba", "dynamic"],
)
def test_training_is_refused_before_the_run_is_begun(data, tmp_path, model, cause):
    folder = make_folder(tmp_path / "model", *model)
    with pytest.raises(IsolationError, match=cause):
        make(data, tmp_path / "run", f"model=hf:{folder}")
    assert not (tmp_path / "run").exists()
    make(data, tmp_path / "run", f"model=hf:{folder}", "data.loader.packing=none")


@pytest.mark.parametrize("model", [ALIBI, MAMBA], ids=["alibi", "mamba"])
def test_documents_that_are_to_see_each_other_are_trained_as_one(data, tmp_path, model):
    """What `attention: row` asks for is what such a model does."""
    folder = make_folder(tmp_path / "model", *model)
    given = (f"model=hf:{folder}", "data.attention=row", "data.loader.rows_per_step=1", *ONE_STEP)
    [row] = next(iter(make(data, tmp_path / "run", *given, dry_run=True).loader))
    assert row.num_documents > 1
    inner = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = inner(
            input_ids=torch.as_tensor(row.tokens[: row.num_tokens].astype("int64"))[None]
        ).logits[0]
    targets = torch.as_tensor(row.targets[0, : row.num_tokens].astype("int64"))
    due = float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100))
    [record] = train(data, tmp_path / "run", *given)
    assert record["loss"] == pytest.approx(due, rel=1e-4)


@pytest.mark.usefixtures("mixing")
def test_a_trained_model_is_refused_as_well(data, tmp_path):
    """`from:` a run whose model trained on rows of one document."""
    folder = make_folder(tmp_path / "model", *MAMBA)
    train(data, tmp_path / "run", f"model=hf:{folder}", "data.loader.packing=none", *ONE_STEP)
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        make(data, tmp_path / "next", f"model=from:{tmp_path / 'run'}")


@pytest.mark.usefixtures("mixing")
@pytest.mark.parametrize("model", [ALIBI, MAMBA, DYNAMIC], ids=["alibi", "mamba", "dynamic"])
def test_losses_are_those_of_one_document_at_a_time(data, tmp_path, model):
    """The evaluator's, and the first step's of a run."""
    folder = make_folder(tmp_path / "model", *model)
    dataset, loaded = open_dataset(data / "data" / "validation"), load_model(folder)
    loaded.eval()
    inner, nats, targets = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0, 0
    with torch.no_grad():
        for number in range(len(dataset)):
            tokens = torch.as_tensor(dataset[number].tokens.astype("int64"))
            assert len(tokens) <= LENGTH
            logits = copy.deepcopy(inner)(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            nats += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
            targets += len(tokens) - 1
    look = HeldOutLoss(
        str(data / "data" / "validation"),
        sequence_length=LENGTH,
        tokenizer=dataset.tokenizer,
        model=loaded,
        ranks=Ranks(torch.device("cpu")),
    )
    found = look(loaded)
    assert found["targets"] == targets
    assert math.isclose(found["loss"], nats / targets, rel_tol=1e-4)
    assert found["packing"] == ONE_A_ROW
    held = f"training.evaluators={{held: {{data: {data / 'data' / 'validation'}}}}}"
    given = ("data.loader.packing=none", *ONE_STEP, "training.optimizer.learning_rate=1e-12", held)
    [record] = train(data, tmp_path / "run", f"model=hf:{folder}", *given)
    assert math.isclose(record["held/loss"], nats / targets, rel_tol=1e-4)
    assert record["held/packing"] == ONE_A_ROW


@pytest.mark.parametrize("model", [ALIBI, MAMBA, RWKV], ids=["alibi", "mamba", "rwkv"])
def test_a_model_that_needs_another_way_trains_on_packed_rows(data, tmp_path, model):
    """And says which way; the first losses are those of one document a row."""
    folder = make_folder(tmp_path / "model", *model)
    given = (f"model=hf:{folder}", *ONE_STEP, "training.optimizer.learning_rate=1e-12")
    trainer = make(data, tmp_path / "dry", *given, dry_run=True)
    assert any(row.num_documents > 1 for row in next(iter(trainer.loader)))
    way = dict(describe(trainer, f"hf:{folder}"))["documents of a row"]
    if model is RWKV:
        lengths = np.diff(next(iter(trainer.loader))[0].cu_seqlens)[:-1].tolist()
        batches = document_batches(np.cumsum([0, *lengths[:-1]]), np.cumsum(lengths), sum(lengths))
        share = 1 - sum(lengths) / sum(inside.size for _, inside in batches)
        assert way.endswith(
            f"as a batch (the first row: {len(batches)} passes, {share:.0%} padding)"
        )
    else:
        assert "passes" not in way
    [packed] = train(data, tmp_path / "run", *given)
    tokens = sum(
        row.num_tokens
        for row in next(iter(make(data, tmp_path / "again", *given, dry_run=True).loader))
    )
    assert tokens > LENGTH
    inner, nats, targets = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), 0.0, 0
    with torch.no_grad():
        for row in next(iter(make(data, tmp_path / "third", *given, dry_run=True).loader)):
            for begin, end in pairwise(row.cu_seqlens[: row.num_documents + 1].tolist()):
                ids, due = (
                    torch.as_tensor(x[begin:end].astype("int64"))
                    for x in (row.tokens, row.targets[0])
                )
                logits = inner(input_ids=ids[None], use_cache=False).logits[0]
                nats += float(
                    torch.nn.functional.cross_entropy(
                        logits, due, ignore_index=-100, reduction="sum"
                    )
                )
                targets += int((due != -100).sum())
    assert packed["loss"] == pytest.approx(nats / targets, rel=1e-4)


@pytest.mark.usefixtures("mixing")
def test_micro_sequences_are_parts_of_a_document(data, tmp_path):
    """A part has a past: a model that keeps more than keys cannot be cut, nor one whose frequencies
    change.
    """
    folder = make_folder(tmp_path / "model", *DYNAMIC)
    one = ("data.loader.packing=none", "training.micro_sequences=2", *ONE_STEP)
    with pytest.raises(IsolationError, match=r"changes.*24.*tokens"):
        make(data, tmp_path / "run", f"model=hf:{folder}", *one)
    llama = make_folder(tmp_path / "llama", "qwen2", {})
    whole = values(train(data, tmp_path / "whole", f"model=hf:{llama}", *ONE_STEP))
    parts = values(train(data, tmp_path / "parts", f"model=hf:{llama}", *ONE_STEP, one[1]))
    assert math.isclose(whole[0], parts[0], rel_tol=1e-5)
    mamba = make_folder(tmp_path / "mamba", *MAMBA)
    with pytest.raises(IsolationError, match="see each other"):
        make(data, tmp_path / "no", f"model=hf:{mamba}", *one)


def teacher(data: Path, folder: Path, model: tuple[str, dict[str, Any]], **settings: Any) -> str:
    """The assignment of a teacher with the student's tokenizer."""
    make_folder(folder, *model)
    for file in (data / "tokenizer").iterdir():
        shutil.copy(file, folder / file.name)
    section = {"model": str(folder), "loss": {"kind": "kl", "top_k": 4}, **settings}
    return f"teacher={json.dumps({'teachers': [section]})}"


@pytest.mark.parametrize(
    ("dry_run", "process"),
    [(True, "here"), (False, "here"), pytest.param(False, "own", marks=pytest.mark.slow)],
)
def test_a_teacher_is_refused_before_the_run_is_begun(data, tmp_path, dry_run, process):
    """Although most rows hold no document that is too long for it."""
    told = teacher(data, tmp_path / "teacher", LONGROPE, process=process)
    error = IsolationError if process == "here" else PenstockError
    cause = (
        r"teacher '.*LlamaForCausalLM .*more than 24 tokens, and rows have 64.*max_tokens to 24 or "
        r"less"
    )
    with pytest.raises(error, match=f"(?s){cause}"):
        make(data, tmp_path / "run", told, dry_run=dry_run)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("cure", ["max_tokens", "sequence_length", "packing"])
def test_each_cure_of_a_teacher_that_was_refused(data, tmp_path, cure):
    told = teacher(
        data, tmp_path / "teacher", LONGROPE, **({"max_tokens": 24} if cure == "max_tokens" else {})
    )
    change = {
        "sequence_length": ["data.loader.sequence_length=24"],
        "packing": ["data.loader.packing=none"],
    }
    assert len(train(data, tmp_path / "run", told, *change.get(cure, []))) == 12


def test_a_teacher_of_a_cache_is_refused_at_once(data, tmp_path):
    told = teacher(data, tmp_path / "teacher", LONGROPE)
    with pytest.raises(IsolationError, match="more than 24 tokens"):
        cache_teacher(data / "run.yaml", tmp_path / "cache", device="cpu", assignments=[told])
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("mixing")
def test_a_teacher_reads_documents_that_are_to_see_each_other_as_one(data, tmp_path):
    """Where it reads the student's own rows; cut or begun otherwise, documents are apart again."""
    told, joined = (
        teacher(data, tmp_path / "teacher", MAMBA, max_tokens=LENGTH),
        "data.attention=row",
    )
    [record] = train(data, tmp_path / "run", told, joined, *ONE_STEP)
    assert record["distillation"] > 0
    for assignments in ((told,), (told.replace(str(LENGTH), "24"), joined)):
        with pytest.raises(IsolationError, match="documents of one row see each other"):
            make(data, tmp_path / "no", *assignments, dry_run=True)


@pytest.mark.parametrize(
    ("reads", "assignment", "due"),
    [
        ({}, "data.attention=document", (LENGTH, LENGTH)),
        ({}, "data.attention=row", None),
        ({}, "data.loader.packing=none", None),
        ({"max_tokens": 99}, "data.attention=row", None),
        ({"max_tokens": 99}, "data.attention=document", (LENGTH, LENGTH)),
        ({"max_tokens": 24}, "data.attention=row", (LENGTH, 24)),
        ({"bos": False}, "data.attention=row", (LENGTH, LENGTH)),
        ({"documents": {"train": "elsewhere"}}, "data.attention=row", (LENGTH, LENGTH)),
        ({"documents": {"train": "elsewhere"}, "max_tokens": 99}, "data.attention=row", (99, 99)),
        (
            {"documents": {"train": "elsewhere"}, "max_tokens": 24},
            "data.attention=row",
            (LENGTH, 24),
        ),
        ({"documents": {"train": "elsewhere"}}, "data.loader.packing=none", None),
    ],
)
def test_what_rows_a_teacher_can_be_given(data, reads, assignment, due):
    tokenizer = load_tokenizer(data / "tokenizer")
    found = packed_rows(
        TeacherText(tokenizer, **reads), tokenizer, load_run(data / "run.yaml", [assignment]).data
    )
    assert found == (None if due is None else PackedRows(*due))


def test_a_router_loss_is_refused(data, tmp_path):
    """It would count padding, and the row's documents as one; training without it must be
    chosen.
    """
    asks = {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
    given = (f"model=hf:{make_folder(tmp_path / 'model', 'mixtral', asks)}", *ONE_STEP)
    with pytest.raises(PenstockError, match="auxiliary router loss"):
        make(data, tmp_path / "dry", *given, dry_run=True)
