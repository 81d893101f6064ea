"""Prepare end to end: what comes out, and that it is the same for any number of processes."""

import json
from pathlib import Path

import numpy as np
import prepare_cases
import pytest
from prepare_cases import contents

from makers.datasets import prepare_here
from makers.texts import write_texts
from penstock import Dataset, load_tokenizer, prepare
from penstock.core.errors import ConfigError, OutputError, RecordError
from penstock.data.prepare import PrepareSettings, executors


def decoded(folder, tokenizer):
    dataset = Dataset.open(folder)
    return [
        tokenizer.decode([i for i in dataset[n].tokens if i not in (0, 1)])
        for n in range(len(dataset))
    ]


def raw_texts(corpus):
    return [
        json.loads(line)["text"]
        for path in sorted(corpus.iterdir())
        for line in path.read_text().split("\n")
        if line
    ]


def test_every_record_comes_out_in_order_with_its_origin(tmp_path, corpus, tokenizer):
    report = prepare_here(corpus, tokenizer, tmp_path / "out", part_bytes=20_000)
    texts = raw_texts(corpus)
    assert decoded(tmp_path / "out", tokenizer) == texts
    assert (report.records, report.documents, report.rejects, report.filtered) == (2203, 2203, 0, 0)
    assert report.text_bytes == sum(len(text.encode()) for text in texts)
    dataset = Dataset.open(tmp_path / "out")
    assert (dataset[0].tokens[0], dataset[0].tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    places = [
        (Path(dataset[n].origin.file).name, dataset[n].origin.line)
        for n in (0, 699, 700, 703, 2202)
    ]
    assert places == [
        ("0.jsonl", 1),
        ("0.jsonl", 700),
        ("1.jsonl", 1),
        ("2.jsonl", 1),
        ("2.jsonl", 1500),
    ]
    assert report.tokens == sum(len(dataset[n].tokens) for n in range(len(dataset)))
    assert report.parts > 5


@pytest.mark.slow
def test_the_same_bytes_for_any_number_of_processes(tmp_path, corpus, tokenizer):
    (corpus / "1.jsonl").write_text('{"text": "a"}\n{broken\n{"text": "b"}\n')
    for processes in (1, 3):
        output = tmp_path / str(processes)
        options = {
            "part_bytes": 30_000,
            "validation": 0.2,
            "on_error": "skip",
            "processes": processes,
        }
        prepare_here(corpus, tokenizer, output, transform=prepare_cases.shout, **options)
    whole = contents(tmp_path / "1")
    assert len([name for name in whole if name.endswith(".arrow")]) > 6
    assert contents(tmp_path / "3") == whole


def test_again_is_a_look_at_the_report(tmp_path, corpus, tokenizer):
    first = prepare_here(corpus, tokenizer, tmp_path / "out")
    before = contents(tmp_path / "out")
    second = prepare_here(corpus, tokenizer, tmp_path / "out")
    assert second.as_json(lasting=True) == first.as_json(lasting=True)
    assert second.seconds is None
    assert contents(tmp_path / "out") == before
    assert "nothing to do" in second.as_text()


def test_other_settings_are_refused(tmp_path, corpus, tokenizer):
    prepare_here(corpus, tokenizer, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(OutputError, match=r"add_eos.*'auto'.*'no'.*set"):
        prepare_here(corpus, tokenizer, tmp_path / "out", add_eos="no")
    assert contents(tmp_path / "out") == before, "a refused preparation leaves no lock"
    assert (
        prepare_here(corpus, tokenizer, tmp_path / "out", add_eos="no", overwrite=True).documents
        == 2203
    )


def test_a_first_try_that_failed_does_not_stand_in_the_way(tmp_path, corpus, tokenizer):
    with pytest.raises(RecordError, match=r"0.jsonl:1: no field 'body'"):
        prepare_here(corpus, tokenizer, tmp_path / "out", text_field="body")
    assert prepare_here(corpus, tokenizer, tmp_path / "out").documents == 2203


def test_folders_that_cannot_be_used(tmp_path, corpus, tokenizer):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match=r"holds other files \(thesis.tex\)"):
        prepare_here(corpus, tokenizer, tmp_path / "other", overwrite=True)
    with pytest.raises(OutputError, match="is a file"):
        prepare_here(corpus, tokenizer, corpus / "0.jsonl")
    with pytest.raises(OutputError, match="cannot write"):
        prepare_here(corpus, tokenizer, "/proc/penstock")


def test_bos_and_eos(tmp_path, tokenizer):
    def ids(name, texts, **options):
        prepare_here(iter(texts), tokenizer, tmp_path / name, **options)
        dataset = Dataset.open(tmp_path / name)
        return [dataset[n].tokens.tolist() for n in range(len(dataset))]

    bos, eos, body = tokenizer.bos_id, tokenizer.eos_id, tokenizer.encode("water").tolist()
    assert ids("auto", ["water"]) == [[bos, *body, eos]]
    assert ids("none", ["water"], add_bos="no", add_eos="no") == [body]
    assert ids("edges", ["<|bos|>water<|eos|>", "water<|eos|>"]) == [[bos, *body, eos]] * 2
    spelled = tokenizer.encode("<|bos|>water").tolist()
    assert bos not in spelled
    assert ids("text", ["<|bos|>water"], add_bos="no") == [[*spelled, eos]]
    with pytest.raises(RecordError, match="only spells BOS and EOS"):
        ids("only", ["<|bos|><|eos|>"])


def test_split_is_stable_when_data_is_added(tmp_path, corpus, tokenizer):
    report = prepare_here(corpus, tokenizer, tmp_path / "one", validation=0.1)
    held_out = set(decoded(tmp_path / "one/validation", tokenizer))
    assert 0.06 < report.splits["validation"].documents / report.documents < 0.14
    write_texts(corpus / "0a.jsonl", (f"new {number}" for number in range(300)))
    prepare_here(corpus, tokenizer, tmp_path / "two", validation=0.1)
    again = set(decoded(tmp_path / "two/validation", tokenizer))
    assert {text for text in again if not text.startswith("new")} == held_out
    assert not held_out & set(decoded(tmp_path / "two/train", tokenizer))
    prepare_here(corpus, tokenizer, tmp_path / "three", validation=0.3)
    assert again <= set(decoded(tmp_path / "three/validation", tokenizer))


def test_rejects_are_written_and_bounded(tmp_path, corpus, tokenizer):
    lines = (corpus / "0.jsonl").read_text().split("\n")
    lines[3], lines[9], lines[10] = "{broken", '{"text": null}', '{"text": ""}'
    (corpus / "0.jsonl").write_text("\n".join(lines))
    with pytest.raises(RecordError, match=r"0.jsonl:4.*JSON: .*set on_error"):
        prepare_here(corpus, tokenizer, tmp_path / "stop")
    report = prepare_here(corpus, tokenizer, tmp_path / "out", on_error="skip")
    assert (report.records, report.documents, report.rejects) == (2203, 2200, 3)
    written = [
        json.loads(line) for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()
    ]
    assert [reject["line"] for reject in written] == [4, 10, 11]
    assert set(written[0]) == {"file", "line", "reason", "excerpt"}
    with pytest.raises(RecordError, match=r"2.*records.*rejected.*max_rejects"):
        prepare_here(corpus, tokenizer, tmp_path / "few", on_error="skip", max_rejects=2)
    assert (
        prepare_here(corpus, tokenizer, tmp_path / "few", on_error="skip", max_rejects=3).rejects
        == 3
    )
    with pytest.raises(RecordError, match=r"3.*2203.*records.*rejected.*0%"):
        prepare_here(corpus, tokenizer, tmp_path / "zero", on_error="skip", max_rejects="0%")


def test_little_text_is_the_work_of_this_process_alone(tmp_path, corpus, tokenizer, monkeypatch):
    hired = []
    monkeypatch.setattr(executors, "Processes", lambda *given: hired.append(given[1]))
    monkeypatch.setattr(executors, "usable_processors", lambda: 4)
    prepare_here(corpus, tokenizer, tmp_path / "little", processes=None, part_bytes=10_000)
    assert hired == []
    monkeypatch.setattr(executors, "WORTH_A_PROCESS", 20_000)
    prepare_here(corpus, tokenizer, tmp_path / "more", processes=None, part_bytes=10_000)
    assert hired == [4]


def test_first_bad_record_in_order_is_reported_by_several_processes(tmp_path, corpus, tokenizer):
    for name, line in (("0", 650), ("2", 3)):
        lines = (corpus / f"{name}.jsonl").read_text().split("\n")
        lines[line - 1] = "{broken"
        (corpus / f"{name}.jsonl").write_text("\n".join(lines))
    with pytest.raises(RecordError, match=r"0.jsonl:650: not JSON"):
        prepare_here(corpus, tokenizer, tmp_path / "out", processes=2, part_bytes=10_000)


def test_transform(tmp_path, corpus, tokenizer):
    report = prepare_here(corpus, tokenizer, tmp_path / "out", transform="prepare_cases:shout")
    due = [text.upper() for text in raw_texts(corpus) if "stops" not in text]
    assert decoded(tmp_path / "out", tokenizer) == due
    assert report.filtered == report.records - len(due) > 0
    with pytest.raises(RecordError, match=r"0.jsonl:8.*transform.*field.*'text'"):
        prepare_here(corpus, tokenizer, tmp_path / "empty", transform=prepare_cases.mistaken)
    with pytest.raises(RecordError, match=r"0.jsonl:1.*KeyError: 'absent'"):
        prepare_here(corpus, tokenizer, tmp_path / "failing", transform=prepare_cases.failing)
    with pytest.raises(ConfigError, match="cannot be imported by other processes"):
        prepare_here(
            corpus, tokenizer, tmp_path / "lambda", transform=lambda record: record, processes=2
        )
    with pytest.raises(ConfigError, match="cannot be imported"):
        prepare_here(corpus, tokenizer, tmp_path / "absent", transform="absent_module:shout")


def test_python_records_and_kept_text(tmp_path, tokenizer):
    records = ["water", {"text": "wheel", "id": 1}, "pipe 🙂"]
    for processes in (1, 2):
        prepare_here(
            iter(records),
            tokenizer,
            tmp_path / str(processes),
            processes=processes,
            part_bytes=3,
            keep_text=True,
        )
    dataset = Dataset.open(tmp_path / "1")
    assert [dataset[n].text for n in range(3)] == ["water", "wheel", "pipe 🙂"]
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert (
        prepare_here(iter(records), tokenizer, tmp_path / "1", part_bytes=3, keep_text=True).seconds
        is None
    )
    report = prepare_here(
        iter(records[:2]), tokenizer, tmp_path / "1", part_bytes=3, keep_text=True
    )
    assert (report.documents, report.parts, report.parts_resumed) == (2, 2, 2)
    prepare_here(iter(records[:2]), tokenizer, tmp_path / "two", part_bytes=3, keep_text=True)
    assert contents(tmp_path / "1") == contents(tmp_path / "two")
    with pytest.raises(RecordError, match="gave no record"):
        prepare_here(iter([]), tokenizer, tmp_path / "none")


def test_weights_become_spans_without_touching_tokens(tmp_path, tokenizer):
    text = "the größe 🙂 flows"
    ranges = [{"begin": 4, "end": 9}, {"begin": 12, "end": 17, "weight": 0.5}]
    records = [
        {"text": text, "w": ranges},
        {"text": text},
        {"text": text, "w": []},
        {"text": text, "w": [{"begin": 0, "end": 17}]},
    ]
    report = prepare_here(iter(records), tokenizer, tmp_path / "out", weights_field="w")
    dataset = Dataset.open(tmp_path / "out")
    plain = [tokenizer.bos_id, *tokenizer.encode(text).tolist(), tokenizer.eos_id]
    assert all(dataset[n].tokens.tolist() == plain for n in range(4))
    pieces = [tokenizer.byte_table[i] for i in plain]
    weights = dataset[0].loss_weights
    at = 0
    for piece, weight in zip(pieces[1:-1], weights[1:-1], strict=True):
        at += len(piece)
        due = 1.0 if 4 < at <= 11 else 0.5 if at > 16 else 0.0
        assert weight == due, (piece, at)
    assert (weights[0], weights[-1]) == (0.0, 0.5)
    assert dataset[1].loss_weights.tolist() == [1.0] * len(plain)
    assert dataset[2].loss_weights.tolist() == [0.0] * len(plain)
    assert dataset[3].loss_weights.tolist() == [0.0] + [1.0] * (len(plain) - 1)
    assert report.splits[""].trained_tokens > 0


def test_unknown_options_and_settings_out_of_range(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match=r"'validaton'.*'validation'\?"):
        prepare_here(iter(["a"]), tokenizer, tmp_path / "out", validaton=0.1)
    for bad, message in (
        ({"validation": 1.0}, "share in"),
        ({"add_bos": "always"}, "add_bos must be one of"),
        ({"on_error": "ignore"}, "stop or skip"),
        ({"max_rejects": "many"}, "max_rejects must be"),
        ({"max_rejects": "-1"}, "max_rejects must be"),
        ({"format": "xml"}, "format must be one of"),
        ({"part_bytes": 0}, "part_bytes must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            PrepareSettings(**bad)


def test_command_line(tmp_path, corpus, tokenizer, capsys):
    from penstock.use.cli import build_app

    tokenizer.save(tmp_path / "tokenizer")
    arguments = [
        "prepare",
        str(corpus),
        "-t",
        str(tmp_path / "tokenizer"),
        "-o",
        str(tmp_path / "out"),
        "-q",
    ]
    build_app(arguments)(args=[*arguments, "--json", "--processes", "1"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["documents"] == 2203
    build_app(arguments)(args=arguments, standalone_mode=False)
    assert "2,203 documents" in capsys.readouterr().out


@pytest.mark.real_data
@pytest.mark.parametrize(
    "name", ["tokenizers/hf/phi-3-mini", "tokenizers/spm/mistral-v3.model", "tokenizers/hf/gpt2"]
)
def test_real_tokenizers_and_text(tmp_path, real_data, name):
    tokenizer = load_tokenizer(real_data / name)
    report = prepare_here(
        real_data / "text/c4_demo.jsonl", tokenizer, tmp_path / "out", keep_text=True
    )
    dataset = Dataset.open(tmp_path / "out")
    assert report.documents == len(dataset) == 300
    for n in (0, 150, 299):
        ids = [
            i for i in dataset[n].tokens.tolist() if i not in (tokenizer.bos_id, tokenizer.eos_id)
        ]
        assert np.array_equal(ids, tokenizer.encode(dataset[n].text))


def test_the_results_do_not_go_into_the_source(tmp_path, tokenizer):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words")
    with pytest.raises(ConfigError, match=r"inside.*source.*texts.*outside"):
        prepare(
            tmp_path / "texts",
            tokenizer=tokenizer,
            output=tmp_path / "texts" / "out",
            progress=False,
        )
    assert not (tmp_path / "texts" / "out").exists()
