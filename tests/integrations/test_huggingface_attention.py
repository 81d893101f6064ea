"""attention="row" through transformers: the logits of the plain, unpacked row, and no leak
check.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import LENGTH, make_loader, make_model

import penstock as ps
from penstock import ModelInput
from penstock.core.errors import IsolationError


def rows_of(folder: Path, **settings: Any) -> list[ModelInput]:
    """Rows of several documents, with padding and without."""
    loader = make_loader(folder, max_epochs=1, packing="next_fit", **settings)
    rows = [row for step in loader for row in step if row.num_documents > 1]
    assert {row.num_tokens == LENGTH for row in rows} == {True, False}
    return rows


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "falcon"])
def test_logits_are_those_of_the_plain_row_and_not_the_isolated_ones(
    counting: Path, kind: str
) -> None:
    """Also of a model that cannot tell documents apart."""
    model = make_model(kind).eval()
    for row, apart in list(zip(rows_of(counting, attention="row"), rows_of(counting), strict=True))[
        :12
    ]:
        used = row.num_tokens
        with torch.no_grad():
            found = model(**ps.huggingface.model_inputs(row)).logits[0, :used]
            plain = model(torch.from_numpy(row.tokens[None, :used]).long(), use_cache=False).logits[
                0
            ]
            isolated = model(**ps.huggingface.model_inputs(apart)).logits[0, :used]
        torch.testing.assert_close(found, plain)
        first = int(apart.cu_seqlens[1])  # type: ignore[index]
        if kind != "falcon":
            torch.testing.assert_close(found[:first], isolated[:first])
            assert (found[first:] - isolated[first:]).abs().max() > 1e-3


def test_several_rows_at_once_are_the_rows_of_each(counting: Path) -> None:
    rows, model = rows_of(counting, attention="row")[:5], make_model().eval()
    found = ps.huggingface.model_inputs(rows)
    assert found["cu_seq_lens_q"].tolist()[0] == 0
    assert found["cu_seq_lens_q"].unique().tolist() == [i * LENGTH for i in range(6)]
    assert found["max_length_q"] == LENGTH
    with torch.no_grad():
        for logits, row in zip(model(**found).logits, rows, strict=True):
            torch.testing.assert_close(
                logits[None], model(**ps.huggingface.model_inputs(row)).logits
            )


def make_trainer(folder: Path, loader: Any, model: Any, **kwargs: Any) -> Any:
    settings = {
        "max_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return ps.huggingface.Trainer(
        model, transformers.TrainingArguments(str(folder), **settings), loader=loader, **kwargs
    )


def test_the_trainer_says_it_and_does_not_check(
    tmp_path: Path, counting: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leaking = {"kind": "bloom", "attention": "eager"}
    make_trainer(tmp_path, make_loader(counting, attention="row"), make_model(**leaking)).train()
    said = [record.message for record in caplog.records if "see each other" in record.message]
    assert said == ["Trainer: documents of one row see each other: loader has attention='row'"]
    caplog.clear()
    make_trainer(tmp_path, make_loader(counting), make_model())
    assert not [record for record in caplog.records if "see each other" in record.message]


def test_an_evaluation_by_document_is_still_checked(tmp_path: Path, counting: Path) -> None:
    apart = make_loader(counting, max_epochs=1)
    with pytest.raises(IsolationError, match="documents of one row see each other"):
        make_trainer(
            tmp_path,
            make_loader(counting, attention="row"),
            make_model("bloom", "eager"),
            eval_loader=apart,
        )
