"""Mistakes of people who begin: each is refused with what was found and what to do."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pytest
import torch

import penstock as ps
from makers.tokenizers import tiny_tokenizer
from penstock.core.errors import PenstockError
from penstock.learn.training.run_folder import RunFolder
from penstock.use.runs.generating import sample_texts, write_replies


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer, a dataset, and what a run's folder has."""
    monkeypatch.chdir(tmp_path)
    controls = ["<|im_start|>", "<|im_end|>"]
    tiny_tokenizer(Path("tok"), ["a text of words"], 300, controls)
    ps.write_dataset("data", [[3, 4, 5], [6, 7]] * 8, vocab_size=300)
    Path("run").mkdir()
    Path("run/run.yaml").write_text("model: {}\n")
    return tmp_path


def _prepare(records: Any, **options: Any) -> object:
    return ps.prepare(
        records, **{"tokenizer": "tok", "output": "made", "progress": False, **options}
    )


def _loader() -> ps.Loader:
    return ps.Loader("data", sequence_length=16, rows_per_step=2, threads=0)


def _train(**options: Any) -> object:
    model = ps.build_model(layers=1, width=8, heads=1, vocab_size=300)
    given: Any = {"steps": 1, "learning_rate": 1e-3, "output": "new", **options}
    return ps.train(model, _loader(), **given)


def _chat(role: str) -> object:
    said = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    return ps.chat.encode(said, tokenizer="tok", template="chatml")


def _read_before() -> object:
    records: Iterator[Any] = iter([{"text": "a"}])
    list(records)
    return _prepare(records)


class _Saveable:
    """Like a tokenizer of transformers."""

    def save_pretrained(self) -> None: ...


class _Lazy:
    """Like a lazy frame of polars."""

    def collect(self) -> None: ...


def _never(*_: object) -> Any:
    raise AssertionError("the model is opened before the arguments are checked")


_ANY: Any = None
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a number for records": (lambda: _prepare(5), "found int, expected a path, a list"),
    "None for records": (lambda: _prepare(None), "found NoneType"),
    "a lazy frame": (lambda: _prepare(_Lazy()), "collect() it first"),
    "a generator again": (_read_before, "a generator gives nothing more once it was read"),
    "no tokenizer": (lambda: _prepare([{"text": "a"}], tokenizer=None), "tokenizer: found None"),
    "a number for a tokenizer": (
        lambda: _prepare([{"text": "a"}], tokenizer=7),
        "tokenizer: found int (7)",
    ),
    "another tokenizer": (
        lambda: ps.load_tokenizer(_ANY or _Saveable()),
        "tokenizer.save_pretrained(FOLDER), and give the folder",
    ),
    "a misspelt role": (lambda: _chat("asistant"), "did you mean assistant?"),
    "a role of nobody": (lambda: _chat("narrator"), "say which it is, such as roles"),
    "a run for a dataset": (lambda: ps.open_dataset("run"), "run: a run, not a dataset"),
    "a tokenizer for a dataset": (lambda: ps.open_dataset("tok"), "a tokenizer, not a dataset"),
    "a dataset for a run": (
        lambda: ps.open_run("data"),
        "give the folder of a run (`penstock train`) or of a model of transformers",
    ),
    "no run": (
        lambda: ps.open_run("runs/of/nobody"),
        "no such folder; give the folder of a run",
    ),
    "overwrite of train": (lambda: _train(overwrite=True), "name another output"),
    "an optimizer of torch": (
        lambda: _train(optimizer=torch.optim.AdamW),
        "expected the name of its kind, a mapping of settings, or OptimizerSettings",
    ),
    "the loader first": (
        lambda: ps.train(_ANY or _loader(), _ANY or torch.nn.Linear(2, 2, bias=False), output="x"),
        "the model comes first, then the loader",
    ),
    "one text to learn from": (
        lambda: ps.train_tokenizer("a text", vocab_size=300, output="t"),
        "expected an iterable of texts, such as a list",
    ),
    "records to learn from": (
        lambda: ps.train_tokenizer(_ANY or [{"text": "a"}], vocab_size=300, output="t"),
        "entry 0 is dict; expected texts, such as (one['text'] for one in records)",
    ),
    "ids to learn from": (
        lambda: ps.train_tokenizer(_ANY or [3], vocab_size=300, output="t"),
        "entry 0 is int; expected texts",
    ),
    "inspect a step": (
        lambda: ps.inspect(_ANY or next(iter(_loader()))),
        "files of conversations or trajectories; ps.inspect(loader, step=…)",
    ),
    "inspect a tokenizer": (
        lambda: ps.inspect(_ANY or ps.load_tokenizer("tok")),
        "tokenizer.show(text)",
    ),
    "a dataset to plan": (
        lambda: ps.plan_run("data"),
        "data: is a folder without run.yaml; expected a run file, or the folder of a run",
    ),
    "inspect None": (lambda: ps.inspect(_ANY), "found None; expected a dataset"),
    "inspect records": (
        lambda: ps.inspect(_ANY or [{"messages": []}]),
        "ps.chat.encode(record, tokenizer=…, template=…) shows a conversation",
    ),
    "a device of nobody": (
        lambda: next(iter(_loader())).torch("gpu"),
        "device 'gpu': expected one that torch knows",
    ),
    "a number for a prompt": (
        lambda: sample_texts("Run.generate", _never, _ANY or 5, 1, {}),
        "Run.generate: found 5, expected a prompt or a list of prompts",
    ),
    "messages for a prompt": (
        lambda: sample_texts("Run.generate", _never, _ANY or [{"role": "user"}], 1, {}),
        "for messages use Run.chat",
    ),
    "None for messages": (
        lambda: write_replies(_never, _ANY, {}),
        "Run.chat: found None, expected a text or a list of messages",
    ),
    "a text among messages": (
        lambda: write_replies(_never, [{"role": "user", "content": "a"}, "b"], {}),
        "Run.chat: message 1 is 'b', expected a mapping with role and content",
    ),
    "a message of nobody": (
        lambda: write_replies(_never, [{"content": "x"}], {}),
        "Run.chat: message 0 is {'content': 'x'}, expected a mapping with role and content",
    ),
    "None in a list of conversations": (
        lambda: write_replies(_never, ["a", None], {}),
        "Run.chat: conversation 1: found None, expected a text or a list of messages",
    ),
    "a list in a list of conversations": (
        lambda: write_replies(_never, [["a", "b"]], {}),
        "Run.chat: conversation 0: message 0 is 'a', expected a mapping with role and content",
    ),
    "a reply to the assistant in a conversation": (
        lambda: write_replies(_never, ["a", [{"role": "assistant", "content": "a"}]], {}),
        "Run.chat: conversation 1: the last message is the assistant's",
    ),
    "a reply to the assistant": (
        lambda: write_replies(_never, [{"role": "assistant", "content": "a"}], {}),
        "the last message is the assistant's",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.usefixtures("here")
def test_a_mistake_is_refused_with_its_cure(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(PenstockError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("here")
def test_one_column_is_texts() -> None:
    columns = (pandas.Series(["a", "b"]), pa.array(["a", "b"]), pa.chunked_array([["a"], ["b"]]))
    for number, column in enumerate(columns):
        assert len(ps.prepare(column, tokenizer="tok", output=f"c{number}", progress=False)) == 2


@pytest.mark.usefixtures("here")
def test_inspect_takes_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "penstock.use.runs.inspecting.run_file_of",
        lambda name: asked.append(name) or "data",  # type: ignore[func-returns-value]
    )
    ps.inspect(RunFolder(**dict.fromkeys(RunFolder.__dataclass_fields__) | {"path": Path("run")}))
    assert asked == ["run"]
