"""Rejects are written as they come; and small things that a preparation says, or must not do."""

import json
import os

import pytest

from makers.datasets import prepare_here
from makers.processes import run_code
from penstock import prepare
from penstock.core.errors import OutputError, RecordError

CHILD = """
import json, resource, sys
from penstock import prepare
from penstock import load_tokenizer
source, tokenizer, output, options = sys.argv[1:]
report = prepare(source, tokenizer=tokenizer, output=output, processes=1, progress=False, on_error="skip",
                 max_rejects="100%", **json.loads(options)).report
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([report.rejects, peak // (1 if sys.platform == "darwin" else 1024)]))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bad", "good", "options"),
    [
        ("a.jsonl", '{"text": ""}\n', '{"text": "a"}\n', {}),
        ("a.txt", "|", "a|", {"separator": "|"}),
        (
            "c.jsonl",
            '{"a": 1}\n',
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            {"template": "chatml"},
        ),
    ],
)
def test_memory_does_not_grow_with_rejects(
    tmp_path, tokenizer, chat_tokenizer, name, bad, good, options
):
    (chat_tokenizer if options.get("template") else tokenizer).save(tmp_path / "tokenizer")
    if options.get("template"):
        good = (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": '
            '"b"}]}\n'
        )
    peaks = []
    for count in (10_000, 100_000):
        (tmp_path / name).write_text(good + bad * count)
        arguments = [
            tmp_path / name,
            tmp_path / "tokenizer",
            tmp_path / str(count),
            json.dumps(options),
        ]
        rejects, peak = json.loads(run_code(CHILD, *arguments, check=True).stdout)
        assert rejects == count
        written = (tmp_path / str(count) / "rejected.jsonl").read_text().splitlines()
        assert len(written) == count
        peaks.append(peak)
    assert peaks[1] - peaks[0] < 40, peaks


def test_rejects_of_all_parts_come_in_order(tmp_path, tokenizer):
    lines = ['{"text": "a"}' if number % 3 else '{"text": ""}' for number in range(40_000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    report = prepare_here(
        tmp_path / "a.jsonl",
        tokenizer,
        tmp_path / "out",
        on_error="skip",
        max_rejects="90%",
        part_bytes=99_999,
    )
    assert report.parts > 3
    rejects = [
        json.loads(line)["line"]
        for line in (tmp_path / "out/rejected.jsonl").read_text().splitlines()
    ]
    assert rejects == [number + 1 for number in range(40_000) if number % 3 == 0]


def test_a_weights_field_that_no_record_has_is_reported(tmp_path, tokenizer, capsys):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "water", "wieghts": [{"begin": 0, "end": 2}]}\n' * 3
    )
    report = prepare(
        tmp_path / "a.jsonl",
        tokenizer=tokenizer,
        output=tmp_path / "out",
        weights_field="weights",
        processes=1,
    ).report
    assert report.weighted == 0
    assert (
        "warning: no record has the field that weights_field names, so all tokens count in full"
        in report.as_text()
    )
    assert (
        "no sampled record has the field 'weights', which weights_field names"
        in capsys.readouterr().err
    )
    right = prepare_here(
        tmp_path / "a.jsonl", tokenizer, tmp_path / "right", weights_field="wieghts"
    )
    assert right.weighted == 3
    assert "warning" not in right.as_text()
    assert prepare_here(iter(["a"]), tokenizer, tmp_path / "none").weighted is None


def test_an_output_that_is_not_utf8(tmp_path, tokenizer):
    output = os.fsdecode(os.fsencode(str(tmp_path)) + b"/\xff")
    with pytest.raises(OutputError, match=r"udcff'.*UTF-8.*folder"):
        prepare_here(iter(["a"]), tokenizer, output)
    assert not os.path.exists(output)


def test_pandas_is_not_imported(tmp_path, tokenizer, chat_tokenizer):
    """It takes 0.2 s of each process."""
    pytest.importorskip("pandas")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tokenizer.save(tmp_path / "tokenizer")
    chat_tokenizer.save(tmp_path / "chat")
    weights = '"w": [{"begin": 0, "end": 1}]'
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a"}\n{broken\n{"text": "<|bos|>b"}\n{"text": "cd", ' + weights + "}\n"
    )
    (tmp_path / "b.txt").write_text("a")
    (tmp_path / "c.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "d.parquet")
    code = """
        import sys
        from penstock import prepare

        home, each = sys.argv[1], eval(sys.argv[2])
        for number, (source, tokenizer, options) in enumerate(each):
            prepare(
                f"{home}/{source}", tokenizer=f"{home}/{tokenizer}", output=f"{home}/{number}",
                progress=False, processes=1, on_error="skip", **options,
            )
            assert "pandas" not in sys.modules, (source, options)
    """
    each = [
        ("a.jsonl", "tokenizer", {"keep_text": True}),
        ("a.jsonl", "tokenizer", {"weights_field": "w"}),
        ("b.txt", "tokenizer", {"validation": 0.5}),
        ("c.jsonl", "chat", {"template": "chatml"}),
        ("d.parquet", "tokenizer", {}),
    ]
    run_code(code, tmp_path, each, check=True)


def test_a_limit_counts_over_blocks(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + '{"text": ""}\n' * 20_000)
    with pytest.raises(RecordError, match=r"17000.*max_rejects"):
        prepare_here(
            tmp_path / "a.jsonl", tokenizer, tmp_path / "out", on_error="skip", max_rejects=17_000
        )
