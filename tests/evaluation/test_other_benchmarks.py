"""A task that gets another task's file says so, and which task reads it; whatever a file holds, the
error is ours.
"""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ConfigError, PenstockError, RecordError
from penstock.learn.evaluation.mmlu import _of_hub
from penstock.learn.evaluation.recognition import converted, task_of, task_of_file
from penstock.learn.evaluation.tasks import TASKS, TaskSettings, make_task, options_of

pytestmark = pytest.mark.filterwarnings("ignore:code that a model wrote runs WITHOUT a sandbox")

FUNCTION = {
    "prompt": "def double(x):\n",
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
}
INPUTS = {"base_input": [[2]], "plus_input": [[3]], "atol": 0, "contract": ""}
HUMANEVAL = {
    **FUNCTION,
    "task_id": "HumanEval/0",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}
MBPP = {"text": "Double it.", "code": "def double(x):\r\n    return 2 * x", "test_setup_code": "",
        "test_list": ["assert double(1) == 2"], "challenge_test_list": []}  # fmt: skip
RECORDS: dict[str, list[dict[str, Any]]] = {
    "humaneval": [HUMANEVAL],
    "humaneval_plus": [{**FUNCTION, **INPUTS, "task_id": "HumanEval/0"}],
    "humaneval_plus of the hub": [
        {
            **HUMANEVAL,
            "test": (
                "def check(candidate):\n    inputs = [[1]]\n    assert candidate(*inputs[0]) == 2\n"
            ),
        }
    ],
    "mbpp": [{**MBPP, "task_id": number} for number in (2, 3, 4, 11)],
    "mbpp_plus": [
        {**FUNCTION, **INPUTS, "task_id": "Mbpp/3", "assertion": "assert double(1) == 2"}
    ],
    "mbpp_plus of the hub": [
        {
            "task_id": 2,
            "code": MBPP["code"],
            "prompt": "Double it.",
            "source_file": "x",
            "test_imports": [],
            "test_list": MBPP["test_list"],
            "test": "inputs = [[1]]\nassert double(1) == 2\n",
        }
    ],
    "gsm8k": [{"question": "One and one?", "answer": "It is 2.\n#### 2"}] * 8,
}
"""What the files of each task look like."""
FORMS = [*RECORDS, "mmlu"]


def task_name(form: str) -> str:
    return form.partition(" ")[0]


def write_mmlu(folder: Path) -> Path:
    for split in ("dev", "test"):
        (folder / split).mkdir(parents=True)
        (folder / split / f"law_{split}.csv").write_text("Who?,a,b,c,d,B\n" * 5)
    return folder


def write(folder: Path, form: str, name: str) -> Path:
    """A file of a form under a name; `name` may end in .gz or .parquet."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "mmlu":
        content = "question,choice0,choice1,choice2,choice3,answer\nWho?,a,b,c,d,1\n" * 3
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS[form]), path)
        return path
    else:
        content = "".join(json.dumps(record) + "\n" for record in RECORDS[form])
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return path


def data_for(task: str, form: str, folder: Path) -> Path:
    """Where a user puts a file of a form for a task."""
    if task == "gsm8k":
        for split in ("test", "train"):
            write(folder, form, f"{split}.jsonl")
        return folder
    if task == "mmlu":
        for split in ("dev", "test"):
            write(folder, form, f"{split}/law_{split}.csv")
        return folder
    return write(folder, form, "file.csv" if form == "mmlu" else "file.jsonl")


def make(task: str, data: Path) -> Any:
    return make_task(TaskSettings(name=task, data=str(data), unsafe="unsafe" in options_of(task)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_with_every_file(tmp_path: Path, task: str, form: str) -> None:
    own = task_name(form)
    if own == task:
        data = write_mmlu(tmp_path) if task == "mmlu" else data_for(task, form, tmp_path)
        assert len(make(task, data).problems()) > 0
    elif (task, own) == ("bits_per_byte", "mbpp"):
        assert len(make(task, data_for(task, form, tmp_path)).problems()) == 4, (
            "its records have a text"
        )
    else:
        data = data_for(task, form, tmp_path)
        with pytest.raises(RecordError, match=rf"(1|2|csv): .*run task {own}\b") as found:
            make(task, data)
        assert str(tmp_path) in str(found.value)
        assert len(str(found.value)) < 700


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("form", RECORDS)
def test_each_way_a_file_is_stored(tmp_path: Path, form: str, ending: str) -> None:
    for task in ("humaneval", "mbpp", "mbpp_plus", "gsm8k", "mmlu"):
        path = write(tmp_path, form, f"{task}.{ending}")
        if task != task_name(form):
            with pytest.raises(RecordError, match=rf"{ending}: .*run task {task_name(form)}"):
                make(task, path)


def test_a_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path, "gsm8k", "train.jsonl")
    with pytest.raises(ConfigError, match=r"train.jsonl.*folder"):
        make("gsm8k", path)
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match=r"has no test/SUBJECT_test.csv"):
        make("mmlu", tmp_path / "other.jsonl")


@pytest.mark.parametrize(
    ("task", "change", "due"),
    [
        ("mbpp", {"task_id": "Mbpp/2"}, "'task_id' is 'Mbpp/2'; expected a whole number"),
        ("mbpp", {"task_id": True}, "'task_id' is True; expected a whole number"),
        ("mbpp", {"test_list": "assert"}, "'test_list' is 'assert'; expected a list"),
        ("mbpp", {"test_list": [1]}, r"'test_list' is \[1\]; expected texts"),
        ("mbpp", {"test_list": []}, r"'test_list' is \[\]; expected texts"),
        ("mbpp", {"code": 5}, "'code' is 5; expected a text"),
        ("mbpp", {"code": "def ("}, "the benchmark's own code or tests are not valid Python"),
        ("mbpp", {"text": None}, "a record has no 'text', only"),
        ("mbpp_plus", {"task_id": 2}, "'task_id' is 2; expected a text"),
        ("mbpp_plus", {"task_id": "two"}, "'task_id' is 'two'; expected Mbpp/ and a number"),
        ("mbpp_plus", {"task_id": "Mbpp/2"}, "cannot be read as a record of mbpp_plus: TypeError"),
        (
            "mbpp_plus",
            {"task_id": "Mbpp/722"},
            "cannot be read as a record of mbpp_plus: AttributeError",
        ),
        ("mbpp_plus", {"base_input": [1]}, "cannot be read as a record of mbpp_plus: TypeError"),
        ("mbpp_plus", {"plus_input": {"a": 1}}, "'plus_input' is {'a': 1}; expected a list"),
        ("mbpp_plus", {"atol": "0"}, "'atol' is '0'; expected a number"),
        ("humaneval_plus", {"atol": None}, "a record has no 'atol'"),
        ("humaneval", {"prompt": ["a"]}, r"'prompt' is \['a'\]; expected a text"),
        ("humaneval", {"test": 3}, "'test' is 3; expected a text"),
        ("gsm8k", {"answer": "none"}, "the answer has no number"),
        ("gsm8k", {"question": 1}, "expected texts question and answer"),
    ],
)
def test_values_of_another_kind(
    tmp_path: Path, task: str, change: dict[str, Any], due: str
) -> None:
    """The message says the place, the field, what was found, and what was expected."""
    *others, last = [{**record} for record in RECORDS[task]]
    lines = [json.dumps(record) for record in [*others, {**last, **change}]]
    for name in ("test.jsonl", "train.jsonl"):
        (tmp_path / name).write_text("\n\n".join(lines))
    data = tmp_path if task == "gsm8k" else tmp_path / "test.jsonl"
    line = len(lines) if task == "gsm8k" else 2 * len(lines) - 1
    with pytest.raises(RecordError, match=rf"test.jsonl: (line|record) {line}: {due}"):
        make(task, data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = sorted({name for records in RECORDS.values() for name in records[0]} | {"choices"})


@given(
    st.sampled_from([name for name in RECORDS if name != "gsm8k"]),
    st.dictionaries(st.sampled_from(NAMES), VALUES),
)
def test_no_record_gives_another_error(
    tmp_path_factory: pytest.TempPathFactory, form: str, change: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("records")
    *others, last = RECORDS[form]
    (folder / "test.jsonl").write_text(
        "\n".join(json.dumps(one) for one in [*others, {**last, **change}])
    )
    for task in ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus"):
        try:
            make(task, folder / "test.jsonl")
        except PenstockError as error:
            assert "test.jsonl" in str(error)  # noqa: PT017  (it may also be read)
    try:
        converted(_of_hub, change, "hub", "mmlu")
    except RecordError as error:
        assert str(error).startswith("hub: ")  # noqa: PT017


def test_files_that_are_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, "mbpp", "mbpp.jsonl.gz")
    content = bytearray(path.read_bytes())
    content[20:40] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"mbpp.jsonl.gz.*\(.*fetch"):
        make("mbpp", path)
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    with pytest.raises(RecordError, match=r"deep.jsonl: line 1.*JSON.*fetch"):
        make("mbpp", tmp_path / "deep.jsonl")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "law_test.csv").write_text("\n")
    with pytest.raises(PenstockError, match=r"law_dev.csv is missing"):
        make("mmlu", tmp_path)


REAL = {
    "humaneval": "HumanEval.jsonl.gz",
    "mbpp": "mbpp.jsonl",
    "mbpp_plus": "MbppPlus-v0.1.0.jsonl.gz",
    "gsm8k": "gsm8k/test.jsonl",
    "mmlu": "mmlu/test/anatomy_test.csv",
}


@pytest.mark.real_data
@pytest.mark.parametrize("own", REAL)
@pytest.mark.parametrize("task", [name for name in TASKS if name != "bits_per_byte"])
def test_real_files(real_data: Path, tmp_path: Path, task: str, own: str) -> None:
    file = real_data / "eval" / REAL[own]
    if task == own:
        folder = {"gsm8k": file.parent, "mmlu": file.parent.parent}.get(task, file)
        assert len(make(task, folder).problems()) > 100
        return
    with pytest.raises(RecordError, match=rf"run task {own}, .*file of {task}"):
        make(task, file)
    if task in ("gsm8k", "mmlu"):
        places = (
            ["test.jsonl", "train.jsonl"]
            if task == "gsm8k"
            else ["dev/law_dev.csv", "test/law_test.csv"]
        )
        for place in places:
            (tmp_path / place).parent.mkdir(exist_ok=True)
            shutil.copy(file, tmp_path / (f"{place}.gz" if file.suffix == ".gz" else place))
        with pytest.raises(RecordError, match=rf"run task {own}, .*file of {task}"):
            make(task, tmp_path)


def test_task_of() -> None:
    assert {form: task_of(records[0]) for form, records in RECORDS.items()} == {
        form: task_name(form) for form in RECORDS
    }
    assert task_of({"question": "a", "choices": ["b"] * 4, "answer": 1, "subject": "law"}) == "mmlu"
    assert [
        task_of(other)
        for other in ({}, {"text": "a"}, [1], None, {"question": "a", "answer": None})
    ] == [None] * 5


def test_files_that_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    for task in ("gsm8k", "mbpp"):
        place = data_for(task, task, tmp_path / task)
        plain = make(task, place)
        for path in [place] if place.is_file() else [*place.glob("*.jsonl")]:
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert make(task, place).fingerprint() == plain.fingerprint()
    assert task_of_file(tmp_path / "gsm8k/test.jsonl") == "gsm8k"
