"""The audit: counts that add up, advice that follows from them, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from makers.datasets import prepare_here
from makers.processes import call_penstock
from makers.texts import write_json_lines, write_texts
from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock.chat import encode
from penstock.core.errors import ConfigError, RecordError
from penstock.tokenizers import Tokenizer
from penstock.use.cli.distill import app
from penstock.use.inspection.teacher_audit import Audit
from penstock.use.inspection.teacher_audit_inputs import audit_chats, audit_dataset, audit_texts
from penstock.use.inspection.teacher_terminal import show_audit

TEXTS = [
    "the water of the turbine flows 12 into 345 gates",
    "a pump, and 水 and Zürich 2024",
    "steel gate " * 9,
]
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the water flows"}] * 2


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "size-300"
    tiny_tokenizer(folder, TEXTS * 3, 300, CHAT_CONTROLS)
    return folder


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "size-420"
    tiny_tokenizer(
        folder, TEXTS * 9, 420, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    )
    return folder


@pytest.fixture(scope="module")
def both(student: Path, teacher: Path) -> tuple[Tokenizer, Tokenizer]:
    from penstock import load_tokenizer

    return load_tokenizer(student), load_tokenizer(teacher)


def test_counts_are_sums_over_documents(both: tuple[Tokenizer, Tokenizer]) -> None:
    audit = Audit(*both)
    found = [audit.add_text(text) for text in TEXTS]
    report = audit.report()
    tokens = [one.num_student_tokens for one in found]
    assert (report.documents, report.student_tokens) == (3, sum(tokens))
    assert report.teacher_tokens == sum(one.num_teacher_tokens for one in found)
    for name in ("coverage", "one_to_one", "orphaned"):
        expected = sum(
            getattr(one, name) * count for one, count in zip(found, tokens, strict=True)
        ) / sum(tokens)
        assert getattr(report, name) == pytest.approx(expected)
    assert report.coverage == report.exact == 1
    assert (report.methods, report.worst) == ({"bytes": 3}, ())
    assert report.chunks == sum(len(one.kinds) for one in found)
    assert report.longest is not None
    sizes = [np.diff(one.student_bounds) + np.diff(one.teacher_bounds) for one in found]
    assert report.longest.student_tokens + report.longest.teacher_tokens == max(
        int(size.max()) for size in sizes
    )


def test_vocabulary_is_compared_by_bytes(both: tuple[Tokenizer, Tokenizer]) -> None:
    entries = [
        {one.byte_table[k] for k in range(one.vocab_size) if not one.byte_table.is_control[k]}
        for one in both
    ]
    audit = Audit(*both)
    audit.add_text(TEXTS[0])
    found = audit.report().vocabulary
    assert (found.student, found.teacher) == (len(entries[0]), len(entries[1]))
    assert found.shared == len(entries[0] & entries[1])
    numerals = {entry for entry in entries[0] if entry.isdigit() and len(entry) > 1}
    assert (found.numerals, found.shared_numerals) == (len(numerals), len(numerals & entries[1]))
    ids = both[0].encode(TEXTS[0]).tolist()
    assert found.in_text == sum(both[0].byte_table[k] in entries[1] for k in ids) / len(ids)


def test_the_worst_places_are_shown(both: tuple[Tokenizer, Tokenizer]) -> None:
    audit = Audit(*both)
    audit._count(
        both[0].encode("the water flows into gates"), both[1].encode("the water falls into gates")
    )
    audit._count(both[0].encode("the water"), both[1].encode("the water" + " 2024 in Bern" * 4))
    report = audit.report()
    assert {place.kind for place in report.worst} == {"different", "orphaned"}
    assert report.worst[0].teacher_text.startswith(" 2024 in Bern 2024 in Bern")
    assert 0 < report.coverage < 1
    assert report.coverage + report.different + report.orphaned == pytest.approx(1)
    assert "look at the places above first" in report.advice


def test_nothing_counted(both: tuple[Tokenizer, Tokenizer]) -> None:
    report = Audit(*both).report()
    assert (report.documents, report.student_tokens, report.longest) == (0, 0, None)
    show_audit(report)


def made(entries: list[bytes]) -> Tokenizer:
    import base64

    lines = b"".join(
        base64.b64encode(entry) + b" %d\n" % rank for rank, entry in enumerate(entries)
    )
    encoding = json.dumps({"pattern": "(?s:.)+", "special_tokens": {}}).encode()
    return Tokenizer("made", {"tokenizer.tiktoken": lines, "encoding.json": encoding})


SINGLE = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("student_more", "teacher_more", "ids", "loss", "words"),
    [
        (
            [b"12", b"34"],
            [b"12", b"34", b"ab"],
            [256],
            "h_kl",
            "2 of the student's 2 numerals of several digits",
        ),
        ([b"12", b"34"], [b"ab"], [256], "p_kl", "0 of the student's 2 numerals of several digits"),
        ([b"ab"], [b"cd"], [256], "p_kl", "only 0.0% of the text's tokens"),
        ([b"ab"], [b"ab"], [256], "kl", "tokenizers are the same"),
        (
            [b"ab"],
            [b"ab", b"cd"],
            [99, 100],
            "alm",
            "100.0% of the text's tokens, but only 0.0% face a single one",
        ),
        ([b"ab"], [b"ab", b"cd"], [256, 99, 256, 100], "h_kl", "over the common vocabulary"),
    ],
)
def test_advice(
    student_more: list[bytes], teacher_more: list[bytes], ids: list[int], loss: str, words: str
) -> None:
    student, teacher = made(SINGLE + student_more), made(SINGLE + teacher_more)
    audit = Audit(student, teacher)
    audit.add_ids(ids * 50)
    report = audit.report()
    assert report.loss == loss
    assert words in report.advice


def test_chats_count_trained_turns(both: tuple[Tokenizer, Tokenizer]) -> None:
    audit = Audit(*both)
    chats = [
        encode(CHAT, tokenizer=one, template=name)
        for one, name in zip(both, ("chatml", "llama3"), strict=True)
    ]
    audit.add_chat(*chats)
    report = audit.report()
    assert report.student_tokens == int((chats[0].loss_weights != 0).sum())
    assert report.control * report.student_tokens == pytest.approx(2)
    assert report.exact + report.control + report.orphaned == pytest.approx(1)


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.jsonl", TEXTS)


def test_inputs(
    both: tuple[Tokenizer, Tokenizer],
    student: Path,
    teacher: Path,
    texts_file: Path,
    tmp_path: Path,
) -> None:
    from_texts, from_data = Audit(*both), Audit(*both)
    audit_texts(from_texts, [str(texts_file)], 2)
    prepare_here(texts_file, student, tmp_path / "data")
    audit_dataset(from_data, str(tmp_path / "data"), both[0], 10)
    assert (from_texts.report().documents, from_data.report().documents) == (2, 3)
    assert from_data.report().coverage > 0.9
    with pytest.raises(
        ConfigError,
        match=r"\(size-300, .*\).*student's \(size-420,",
    ):
        audit_dataset(Audit(both[1], both[0]), str(tmp_path / "data"), both[1], 10)
    chats = write_json_lines(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": []}])
    with pytest.raises(RecordError, match=r"chats.jsonl:2"):
        audit_chats(Audit(*both), [str(chats)], both, ("chatml", "llama3"), 5)


def test_command(student: Path, teacher: Path, texts_file: Path) -> None:
    shown = call_penstock("audit", student, teacher, "--text", texts_file, app=app)
    assert shown.exit_code == 0
    for words in (
        "size-300 learns from size-420",
        "3 documents",
        "in chunks",
        "100.00 %",
        "longest chunk",
    ):
        assert words in shown.stdout
    words = ("audit", student, teacher, "--text", texts_file, "--documents", 2, "--json")
    reported = json.loads(call_penstock(*words, app=app).stdout)
    assert (reported["documents"], reported["coverage"], reported["methods"]) == (
        2,
        1.0,
        {"bytes": 2},
    )
    assert set(reported) >= {"loss", "advice", "vocabulary", "longest", "worst", "orphaned"}


def test_command_needs_an_input(student: Path, teacher: Path) -> None:
    with pytest.raises(ConfigError, match="give text, data or chats"):
        call_penstock("audit", student, teacher, app=app)


def test_one_call_audits_texts_and_datasets(
    student: Path, teacher: Path, both: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    data = ps.prepare(iter(TEXTS), tokenizer=student, output=tmp_path / "data", progress=False)
    audit = Audit(*both)
    audit_texts(audit, [str(tmp_path / "texts.txt")], 9, format="text")
    audit_dataset(audit, str(data.path), both[0], 9)
    found = ps.inspection.audit_teacher(
        student, teacher, text=[str(tmp_path / "texts.txt")], data=[str(data.path)],
        documents=9, format="text",
    )  # fmt: skip
    assert found == audit.report()
    for count in (0, -1):
        with pytest.raises(ConfigError, match=f"documents must be at least 1, got {count}"):
            ps.inspection.audit_teacher(student, teacher, data=[str(data.path)], documents=count)
    with pytest.raises(ConfigError, match="nothing to audit"):
        ps.inspection.audit_teacher(student, teacher)
