"""TRL's SFTTrainer fed by a loader: isolation and loss, exact resume, two ranks, and what is
refused.
"""

import json
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, make_dataset, make_model

pytest.importorskip("trl", reason="trl is not installed: pip install trl==1.16.0")
from trl_run import make_rows_loader, make_tokenizer, recording_trainer, settings_of, train_once

import penstock as ps
from makers.processes import free_port, rank_environment
from patience import PATIENCE_SECONDS
from penstock.core.errors import ConfigError, DistributedError, StateError

pytestmark = pytest.mark.filterwarnings("ignore")


def make_trainer(
    data: Path, output: Path, *, loader: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    settings = kwargs.pop("settings", {})
    kwargs = {"model": make_model(), "loader": make_rows_loader(data, **(loader or {})), **kwargs}
    return recording_trainer(args=settings_of(output, **settings), **kwargs)


def loss_of_documents(model: Any, documents: list[tuple[Any, Any]]) -> float:
    """Mean over all targets, each document run by itself; documents are (tokens, labels not
    shifted).
    """
    total, count = 0.0, 0
    with torch.no_grad():
        for ids, labels in documents:
            logits = model(torch.tensor(ids)[None]).logits[0, :-1].float().log_softmax(-1)
            goals = torch.tensor(labels)[1:]
            kept = goals >= 0
            total -= float(logits[kept, goals[kept]].sum())
            count += int(kept.sum())
    return total / count


def documents_of(step: Any) -> list[tuple[Any, Any]]:
    found = []
    for row in step:
        borders = row.cu_seqlens[row.cu_seqlens <= row.num_tokens]
        for begin, end in pairwise(borders):
            ids, targets = row.tokens[begin:end], row.targets[0][begin:end]
            found.append((ids.tolist(), [-100, *targets[:-1].tolist()]))
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows_per_microbatch", [1, 4])
def test_loss_is_that_of_the_documents_one_by_one(
    tmp_path: Path, counting: Path, attention: str, rows_per_microbatch: int
) -> None:
    trainer = make_trainer(
        counting,
        tmp_path,
        model=make_model(attention=attention),
        rows_per_microbatch=rows_per_microbatch,
        settings={"max_steps": 1, "learning_rate": 0.0},
    )
    trainer.train()
    step = next(iter(make_rows_loader(counting)))
    model = make_model(attention=attention).eval()
    ours = sum(float(ps.huggingface.loss(model, row, step.loss_denominator)) for row in step)
    theirs = sum(batch["loss"] for batch in trainer.seen)
    assert theirs == pytest.approx(loss_of_documents(model, documents_of(step)), rel=1e-6)
    assert theirs == pytest.approx(ours, rel=1e-6)
    assert [batch["count"] for batch in trainer.seen] == [step.loss_denominator] * (
        4 // rows_per_microbatch
    )
    # The control: with documents that see each other the loss is another.
    leaking = sum(
        float(ps.huggingface.loss(model, row, step.loss_denominator))
        for row in next(iter(make_rows_loader(counting, attention="row")))
    )
    assert abs(leaking - theirs) > 1e-3


def test_every_target_arrives(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Labels of TRL's batches, moved by one, are the loader's targets; also where weights are 0."""
    folder = tmp_path_factory.mktemp("masked") / "data"
    random = np.random.default_rng(5)
    tokens = [random.integers(0, VOCABULARY, random.integers(2, 30)) for _ in range(60)]
    spans = [[(len(ids) // 2, len(ids), 1.0)] for ids in tokens]
    ps.write_dataset(folder, tokens, spans=spans, vocab_size=VOCABULARY)
    trainer = make_trainer(folder, tmp_path, settings={"max_steps": 3, "learning_rate": 0.0})
    trainer.train()
    rows = [row for step in islice(make_rows_loader(folder), 3) for row in step]
    assert len(trainer.seen) == len(rows)
    for batch, row in zip(trainer.seen, rows, strict=True):
        used = row.num_tokens
        assert batch["input_ids"][0] == row.tokens[:used].tolist()
        assert batch["position_ids"][0] == row.positions[:used].tolist()
        assert batch["labels"][0][1:] == row.targets[0][: used - 1].tolist()
        assert (row.targets[0][used - 1 :] == -100).all()


def test_resumed_anywhere_equals_uninterrupted(tmp_path: Path, counting: Path) -> None:
    settings = {"data": str(counting), "max_steps": 4, "save_steps": 1}
    whole = train_once(output=str(tmp_path), **settings)
    for step in range(1, 4):
        resumed = train_once(
            output=str(tmp_path), resume=str(tmp_path / f"checkpoint-{step}"), **settings
        )
        assert resumed["seen"] == whole["seen"][2 * step :]
        assert resumed["losses"] == whole["losses"]
        assert resumed["weights"] == whole["weights"]
    assert len(whole["seen"]) == 8
    assert whole["losses"][-1] < whole["losses"][0]


def run_on_ranks(folder: Path, size: int, **settings: Any) -> list[dict[str, Any]]:
    port, processes = free_port(), []
    for rank in range(size):
        source = folder / f"settings-{rank}.json"
        source.write_text(
            json.dumps({"output": str(folder / "out"), **settings, "ranks": [rank, size]})
        )
        program = str(Path(__file__).with_name("trl_run.py"))
        command = [sys.executable, program, str(source), str(folder / f"found-{rank}.json")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(
            subprocess.Popen(command, env=rank_environment(rank, size, port), text=True, **pipes)
        )
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size, "\n".join(outputs)[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.slow
def test_two_ranks_and_new_processes_train_what_one_does(tmp_path: Path, counting: Path) -> None:
    settings = {"data": str(counting), "max_steps": 4, "rows_per_microbatch": 1}
    one = train_once(output=str(tmp_path / "one"), **settings)
    two = run_on_ranks(tmp_path, 2, **settings)
    np.testing.assert_allclose(two[0]["losses"], one["losses"], rtol=1e-5)
    np.testing.assert_allclose(two[0]["weights"], one["weights"], atol=2e-4)
    joined = [batch for at in range(0, 8, 2) for rank in two for batch in rank["seen"][at : at + 2]]
    assert [batch["input_ids"] for batch in joined] == [batch["input_ids"] for batch in one["seen"]]
    assert [batch["count"] for batch in joined] == [batch["count"] for batch in one["seen"]]
    # New processes resume bit for bit; one process resumes the checkpoint of two.
    again = run_on_ranks(tmp_path, 2, resume=str(tmp_path / "out" / "checkpoint-2"), **settings)
    for rank in range(2):
        assert again[rank]["seen"] == two[rank]["seen"][4:]
        assert again[rank]["losses"] == two[rank]["losses"]
    single = train_once(
        output=str(tmp_path / "one"), resume=str(tmp_path / "out" / "checkpoint-2"), **settings
    )
    np.testing.assert_allclose(single["losses"], one["losses"], rtol=1e-5)


def test_last_short_step_is_trained(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A loader that ends sets the number of steps; what it lacks in the last one has no targets."""
    small = make_dataset(tmp_path_factory.mktemp("short") / "data", documents=29, seed=2)
    loader = make_rows_loader(small, epochs=1)
    steps = loader.count_steps()
    last = list(loader)[-1]
    assert len(last) % 4 != 0
    found = train_once(str(small), str(tmp_path), epochs=1, max_steps=-1, rows_per_microbatch=1)
    assert found["steps"] == steps
    assert len(found["seen"]) == 4 * steps
    assert found["seen"][-1]["labels"] == [[-100]]
    assert found["seen"][-1]["count"] == last.loss_denominator


def test_evaluation_is_exact(tmp_path: Path, counting: Path, weighted: Path) -> None:
    held = make_rows_loader(weighted, epochs=1)
    trainer = make_trainer(
        counting, tmp_path, eval_loader=held, settings={"eval_strategy": "steps", "eval_steps": 2}
    )
    trainer.train()
    steps = list(make_rows_loader(weighted, epochs=1))
    trainer.model.eval()
    with torch.no_grad():
        total = sum(
            float(ps.huggingface.loss(trainer.model, row, 1.0)) for step in steps for row in step
        )
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        total / sum(step.loss_denominator for step in steps), rel=1e-5
    )
    assert sum("eval_loss" in log for log in trainer.state.log_history) == 4


def test_lora_trains(tmp_path: Path, counting: Path) -> None:
    peft = pytest.importorskip("peft")
    trainer = make_trainer(
        counting,
        tmp_path,
        peft_config=peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
        settings={"max_steps": 2},
    )
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            {"too_long": "split"},
            r"drops the target at the end .* too_long='split' would cut .*longest has 40 tokens",
        ),
        ({"packing": "concat", "too_long": None}, r"packing='concat' cuts documents"),
        (
            {"requirements": ps.InputRequirements(target_distances=2, cu_seqlens=True)},
            "one target for each slot",
        ),
        (
            {"requirements": ps.InputRequirements(positions=True)},
            "rows of loader have no cu_seqlens",
        ),
    ],
)
def test_loaders_that_labels_do_not_express_are_refused(
    tmp_path: Path, counting: Path, loader: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(counting, tmp_path, loader=loader)


def test_fractional_weights_are_refused(tmp_path: Path, weighted: Path) -> None:
    with pytest.raises(ConfigError, match=r"source.*'data'.*weights.*0.*1"):
        make_trainer(weighted, tmp_path)


def test_prefixes_are_refused(tmp_path: Path, counting: Path) -> None:
    objective = ps.Denoise([ps.objectives.PrefixLM(mode=None)], sentinels=[60])
    loader = ps.Loader(
        ps.Source(counting, objective=objective, too_long="drop"),
        sequence_length=64,
        rows_per_step=4,
    )
    with pytest.raises(ConfigError, match="bidirectional prefixes"):
        recording_trainer(args=settings_of(tmp_path), model=make_model(), loader=loader)


def test_preferences_are_refused(tmp_path: Path) -> None:
    tree = ps.shards.build_tree([[1, 2, 3], [1, 2, 4]], values={"rank": [0, 1]}, share=False)
    spans = [[(i, i + 1, float(weight)) for i, weight in enumerate(tree.loss_weights) if weight]]
    data = ps.write_dataset(
        tmp_path / "pairs", [tree.tokens], trees=[tree.tree], spans=spans, vocab_size=VOCABULARY
    )
    with pytest.raises(ConfigError, match="answers that are better or worse"):
        make_trainer(data.path, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True}, r"packing=True does not go with a loader"),
        ({"assistant_only_loss": True}, "what is trained was decided when the data were prepared"),
        ({"average_tokens_across_devices": False}, "loss depended on the ranks"),
        ({"per_device_train_batch_size": 3}, r"per_device_train_batch_size is 3, but 1 is used"),
    ],
)
def test_settings_that_contradict_the_loader_are_refused(
    tmp_path: Path, counting: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(counting, tmp_path, settings=settings)


def test_arguments_that_are_not_the_loaders_are_refused(tmp_path: Path, counting: Path) -> None:
    import transformers

    with pytest.raises(ConfigError, match=r"train_dataset does not go with a loader"):
        make_trainer(counting, tmp_path, train_dataset=[1])
    with pytest.raises(ConfigError, match=r"'formatting_func'.*penstock.prepare"):
        make_trainer(counting, tmp_path, formatting_func=str)
    with pytest.raises(ConfigError, match=r"args must be trl.SFTConfig"):
        ps.trl.SFTTrainer(
            make_model(),
            transformers.TrainingArguments(str(tmp_path)),
            loader=make_rows_loader(counting),
        )
    with pytest.raises(DistributedError, match="made for rank 1 of 2"):
        make_trainer(counting, tmp_path, loader={"ranks": (1, 2)})


def test_checkpoint_of_other_data_is_refused(
    tmp_path: Path, counting: Path, tmp_path_factory: Any
) -> None:
    other = make_dataset(tmp_path_factory.mktemp("other") / "data", documents=29, seed=2)
    train_once(str(counting), str(tmp_path), max_steps=2)
    with pytest.raises(StateError, match="holds other documents"):
        train_once(str(other), str(tmp_path), resume=str(tmp_path / "checkpoint-2"))


def test_trl_reads_prepared_datasets_too(tmp_path: Path) -> None:
    """`to_datasets` goes into TRL's own trainer: one batch of padded documents, with what is not
    trained left out.
    """
    import trl

    random = np.random.default_rng(5)
    tokens = [random.integers(3, VOCABULARY, random.integers(4, 30)) for _ in range(8)]
    spans = [[(len(ids) // 2, len(ids), 1.0)] for ids in tokens]
    data = ps.write_dataset(tmp_path / "data", tokens, spans=spans, vocab_size=VOCABULARY)
    model = make_model()
    wanted = loss_of_documents(
        model,
        [
            (ids, np.where(np.arange(len(ids)) >= len(ids) // 2, ids, -100).tolist())
            for ids in tokens
        ],
    )
    args = settings_of(
        tmp_path / "run", max_steps=1, learning_rate=0.0, per_device_train_batch_size=8
    )
    trainer = trl.SFTTrainer(
        model, args, train_dataset=data.to_datasets(), processing_class=make_tokenizer()
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-4)


def test_tokenizer_of_the_run_is_saved(tmp_path: Path, counting: Path) -> None:
    make_trainer(counting, tmp_path, settings={"max_steps": 2}).train()
    assert (tmp_path / "checkpoint-2" / "tokenizer_config.json").exists()
    assert make_tokenizer().pad_token_id == 2
