"""With megatron-core: a GPTModel over packed batches on 1 and 2 × 2 ranks, resumed; `.bin` and
`.idx` both ways.
"""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY

pytest.importorskip(
    "megatron.core",
    reason="megatron-core is not installed: pip install --no-deps megatron-core==0.16.1",
)

import penstock as ps
from makers.processes import free_port, rank_environment
from patience import PATIENCE_SECONDS
from penstock.core.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def train(folder: Path, ranks: int, **settings: Any) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True, parents=True)
    port, processes = free_port(), []
    settings = {"tensor_ranks": 1, "steps": 4, "rows": 4, "state": None, **settings}
    for rank in range(ranks):
        source = folder / f"settings-{rank}.json"
        source.write_text(json.dumps(settings))
        program = str(Path(__file__).with_name("megatron_run.py"))
        command = [
            sys.executable,
            "-W",
            "ignore",
            program,
            str(source),
            str(folder / f"found-{rank}.json"),
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(
            subprocess.Popen(command, env=rank_environment(rank, ranks, port), text=True, **pipes)
        )
    outputs = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
def test_losses_are_those_of_the_steps(tmp_path: Path, weighted: Path) -> None:
    """Fractional weights; however rows are joined, documents padded and ranks laid out; resumed in
    new processes.
    """
    (whole,) = train(tmp_path / "one", 1, data=str(weighted))
    assert whole["losses"][-1] < whole["losses"][0]
    assert whole["losses"][0] == pytest.approx(whole["alone"], rel=1e-5)
    assert abs(whole["leaking"] - whole["alone"]) > 1e-3

    (again,) = train(
        tmp_path / "one",
        1,
        data=str(weighted),
        steps=2,
        state=whole["states"][1],
        weights=whole["weights"],
    )
    assert again["seen"] == whole["seen"][8:]
    assert again["losses"] == whole["losses"][2:]

    for options in ({"rows_per_microbatch": 4}, {"rows_per_microbatch": 2, "document_multiple": 4}):
        (found,) = train(tmp_path / "joined", 1, data=str(weighted), **options)
        np.testing.assert_allclose(found["losses"], whole["losses"], rtol=1e-4)

    grid = train(tmp_path / "grid", 4, data=str(weighted), tensor_ranks=2)
    by_place = {tuple(one["place"][:2]): one for one in grid}
    assert set(by_place) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for data_rank in range(2):
        assert by_place[0, data_rank]["seen"] == by_place[1, data_rank]["seen"]
    for one in grid:
        np.testing.assert_allclose(one["losses"], whole["losses"], rtol=1e-4)
        assert one["states"] == whole["states"]


@pytest.mark.slow
def test_a_grid_resumes_in_new_processes(tmp_path: Path, weighted: Path) -> None:
    whole = train(tmp_path / "whole", 4, data=str(weighted), tensor_ranks=2)
    again = train(
        tmp_path / "again",
        4,
        data=str(weighted),
        tensor_ranks=2,
        steps=2,
        state=whole[0]["states"][1],
        weights=[one["weights"] for one in whole],
    )
    for before, after in zip(whole, again, strict=True):
        assert after["seen"] == before["seen"][4:]
        assert after["losses"] == before["losses"][2:]


def test_parameters_are_megatrons(weighted: Path) -> None:
    loader = ps.Loader(weighted, sequence_length=64, rows_per_step=4)
    batch = next(ps.megatron.Batches(loader, rows_per_microbatch=2, document_multiple=4))
    found = ps.megatron.packed_seq_params(batch)
    assert type(found).__module__ == "megatron.core.packed_seq_params"
    assert found.qkv_format == "thd"
    assert torch.equal(found.cu_seqlens_q, batch["cu_seqlens"])
    assert torch.equal(found.cu_seqlens_kv_padded, batch["cu_seqlens_padded"])
    assert found.max_seqlen_q == found.max_seqlen_kv == batch["max_seqlen"]
    assert (batch["cu_seqlens_padded"] % 4 == 0).all()


def test_loss_leaves_out_what_has_no_target() -> None:
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    batch = {
        "loss_mask": torch.tensor([[1.0, 0.0, 0.5]]),
        "denominator": 3.0,
        "num_microbatches": 2,
        "data_parallel_size": 4,
    }
    scaled, log = ps.megatron.step_loss(config, batch, torch.tensor([[1.0, float("inf"), 4.0]]))
    assert float(scaled) == pytest.approx(2 * 4 * 3.0 / 3.0)
    assert float(log["lm loss"]) == pytest.approx(1.0)
    empty = {**batch, "loss_mask": torch.zeros(1, 3), "denominator": 0.0}
    assert float(ps.megatron.step_loss(config, empty, torch.ones(1, 3))[0]) == 0
    with pytest.raises(ConfigError, match="calculate_per_token_loss"):
        ps.megatron.step_loss(
            replace(config, calculate_per_token_loss=True), batch, torch.ones(1, 3)
        )


def test_a_corpus_of_megatron_is_read_in_place(tmp_path: Path) -> None:
    """Written by Megatron's builder, with documents of several sequences."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
    documents = []
    for number in range(50):
        parts = [
            random.integers(0, VOCABULARY, random.integers(1, 20)) for _ in range(1 + number % 3)
        ]
        documents.append(np.concatenate(parts).tolist())
        builder.add_document(torch.from_numpy(np.concatenate(parts)), [len(part) for part in parts])
    builder.finalize(str(tmp_path / "corpus.idx"))
    corpus = ps.open_dataset(tmp_path / "corpus")
    assert [document.tokens.tolist() for document in corpus[:]] == documents
    loader = ps.Loader(corpus, sequence_length=64, rows_per_step=4)
    batch = next(ps.megatron.Batches(loader, rows_per_microbatch=4))
    assert batch["denominator"] > 0


def test_megatron_reads_what_we_write(tmp_path: Path, counting: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = ps.Dataset.open(counting)
    ps.shards.write_megatron(data, tmp_path / "written")
    found = IndexedDataset(str(tmp_path / "written"), multimodal=False, mmap=True)
    assert len(found) == len(data)
    assert [found[i].tolist() for i in range(len(found))] == [
        document.tokens.tolist() for document in data[:]
    ]
    assert found.document_indices.tolist() == list(range(len(data) + 1))
    again = ps.open_dataset(tmp_path / "written")
    assert [one.tokens.tolist() for one in islice(again[:], 5)] == [
        one.tokens.tolist() for one in data[:5]
    ]
