"""What tests of real models rest on, without a model: their report, their questions, and how
weights are joined.
"""

import hashlib
from pathlib import Path

import make_models
import pytest
import real_report
from real_report import BEGIN, END, Report, to
from real_texts import CRAFTS, craft_pairs, write_questions

from penstock.learn.evaluation import TaskSettings, make_task


def test_a_report_takes_the_place_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_report, "version", lambda name: "1.0")
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n\n{BEGIN}\nold | figures\n{END}\n\nAfter.\n", encoding="utf-8")
    report = Report(seconds=130)
    report.add("loss", "0.5", f"them: equal {to(3e-6)}")
    report.add("logits", "1", f"them: equal {to(0)}")
    report.write_section(page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Before\n\n{BEGIN}\n`make test-real`, 20")
    assert text.endswith(f"\n{END}\n\nAfter.\n")
    assert (
        "| loss | 0.5 | them: equal to 3e-06 |\n| logits | 1 | them: equal bit for bit |\n" in text
    )
    assert "trl 1.0" in text
    assert "2 minutes" in text
    assert "old" not in text
    page.write_text("# Nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"page\.md.*<!--.*models.*begin.*-->"):
        report.write_section(page)


def test_the_page_has_a_place_for_the_report() -> None:
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1


def test_own_questions_are_in_the_official_formats(tmp_path: Path) -> None:
    write_questions(tmp_path)
    for name, count in {"mmlu": 5, "gsm8k": 4}.items():
        task = make_task(TaskSettings(name=name, data=str(tmp_path / name), shots=2))
        assert len(task.problems()) == count


def test_each_pair_has_two_answers() -> None:
    pairs = craft_pairs()
    assert len(pairs) == len(CRAFTS)
    assert all(pair["chosen"] != pair["rejected"] for pair in pairs)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    parts = [tmp_path / "a", tmp_path / "b"]
    for part in parts:
        part.write_bytes(part.name.encode())
    make_models.join_files(parts, tmp_path / "whole", hashlib.sha256(b"ab").hexdigest())
    assert (tmp_path / "whole").read_bytes() == b"ab"
    with pytest.raises(SystemExit, match=r"a, b: .*fb8e20fc\w+, expected 00; "):
        make_models.join_files(parts, tmp_path / "whole", "00")


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(make_models.PACKAGES, "smollm2", ("no-such-package-of-weights",))
    with pytest.raises(SystemExit, match=r"no-such-package.*`make real-models MODELS=smollm2`"):
        make_models.weight_files("smollm2")
