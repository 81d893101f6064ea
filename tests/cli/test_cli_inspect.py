"""`penstock inspect` as a user meets it: what kind of target it takes for what, pages, comparisons,
errors.
"""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from makers.datasets import prepare_here
from makers.texts import make_chat, write_json_lines, write_texts
from makers.tokenizers import CHAT_CONTROLS, CHATML, tiny_tokenizer
from penstock.core.errors import ConfigError
from penstock.use import cli

CHATS = [make_chat(f"Gate {n}?", f"Gate {n} is shut.") for n in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Raw chats, a tokenizer with a template, datasets of chats and of texts, a run file."""
    folder = tmp_path_factory.mktemp("inspect")
    write_json_lines(folder / "chats.jsonl", [*CHATS, {"text": "none"}])
    texts = [f"Water level {n}, gate shut.\n" * 3 for n in range(20)]
    write_texts(folder / "texts.jsonl", texts)
    tiny_tokenizer(folder / "tokenizer", texts, 320, CHAT_CONTROLS)
    (folder / "chat.jinja").write_text(CHATML)
    (folder / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    tokenizer = folder / "tokenizer"
    prepare_here(folder / "texts.jsonl", tokenizer, folder / "texts")
    prepare_here(
        folder / "chats.jsonl", tokenizer, folder / "chats", template="auto", on_error="skip"
    )
    (folder / "run.yaml").write_text(
        "data:\n  sources:\n    - {path: texts, share: 0.5}\n    - {path: chats, share: 0.5}\n"
        "  loader: {sequence_length: 64, rows_per_step: 4, seed: 1}\n"
    )
    return folder


@pytest.fixture
def inspect(folder, monkeypatch, command_line):
    """Runs the verb in the folder: exit code, standard output and standard error."""
    monkeypatch.chdir(folder)
    return partial(command_line, "inspect")


def data_of(page: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1])


def test_raw_conversations_in_the_terminal(inspect):
    code, out, err = inspect("chats.jsonl", "--tokenizer", "tokenizer", "--documents", "2")
    assert (code, err) == (0, "")
    assert out.count("▌ assistant") == 2
    assert re.search(r"proven +12\n|proven +12 ", out)
    assert "chats.jsonl:13: no known layout" in out
    assert "mask_history no" in out


def test_a_list_has_a_line_for_each_conversation_with_its_first_words(inspect, folder, capsys):
    code, out, err = inspect("chats.jsonl", "--tokenizer", "tokenizer", "--list")
    assert (code, err) == (0, "")
    lines = out.splitlines()[1:]
    assert len(lines) == 13
    assert re.match(r"✓ conversation 4 +\d+ +\d+%  Gate 4\?", lines[4])
    assert lines[12].startswith("✗ conversation 12")
    assert (
        len(
            inspect("chats.jsonl", "--tokenizer", "tokenizer", "--list", "--documents", "3")[
                1
            ].splitlines()
        )
        == 4
    )
    listed = inspect("chats", "--list", "--document", "2", "--document", "5")[1]
    assert [line.split()[1] for line in listed.splitlines()[1:]] == ["2", "5"]
    assert "Gate 2?" in listed
    ps.inspect(folder / "chats", listed=True, documents=[2, 5])
    assert capsys.readouterr().out == listed
    assert "Water level 0, gate shut." in inspect("texts", "--list", "--documents", "1")[1]


def test_a_page_of_conversations_and_its_comparison(inspect, tmp_path):
    page = tmp_path / "chats.html"
    code, out, _ = inspect(
        "chats.jsonl",
        "-t",
        "tokenizer",
        "--template",
        "chat.jinja",
        "--html",
        str(page),
        "--mask-history",
        "--compare",
        "mask_history=false",
        "--compare",
        "train_on_eos=none",
    )
    assert code == 0
    assert f"{page}: " in out
    data = data_of(page)
    assert [len(side["documents"]) for side in data["sides"]] == [13, 13]
    assert [side["title"] for side in data["sides"]] == ["as set", "changed"]
    assert [dict(side["settings"])["mask_history"] for side in data["sides"]] == ["yes", "no"]
    assert [dict(side["settings"])["train_on_eos"] for side in data["sides"]] == ["turn", "none"]
    assert data["sides"][0]["documents"][12]["notes"][0][0] == "refused"


def test_documents_bound_a_page(inspect, tmp_path):
    page = tmp_path / "some.html"
    for target, more in (("chats.jsonl", ["-t", "tokenizer"]), ("chats", []), ("texts", [])):
        assert inspect(target, *more, "--documents", "4", "--html", str(page))[0] == 0
        assert len(data_of(page)["sides"][0]["documents"]) == 4


def test_a_page_of_a_dataset_of_chats_has_settings_roles_and_rows(inspect, tmp_path):
    page = tmp_path / "dataset.html"
    assert inspect("chats", "--html", str(page), "--sequence-length", "64")[0] == 0
    data = data_of(page)
    assert {"user", "assistant"} <= set(data["roles"])
    assert ["mask_history", "no"] in data["sides"][0]["settings"]
    assert data["rows"]
    assert all(row["slots"] == 64 for row in data["rows"])


def test_a_page_of_a_mixture_has_rows_and_shares(inspect, tmp_path):
    page = tmp_path / "run.html"
    assert (
        inspect("run.yaml", "--html", str(page), "--set", "data.loader.sequence_length=128")[0] == 0
    )
    data = data_of(page)
    assert [row["slots"] for row in data["rows"]] == [128] * 4
    assert data["shares"][0] == {
        "name": "requested share",
        "parts": [["texts", 0.5], ["chats", 0.5]],
    }


def test_a_dataset_of_chats_is_shown_turn_by_turn(inspect):
    code, out, _ = inspect("chats", "--documents", "1")
    assert code == 0
    assert "▌ assistant" in out
    assert "template chat_template.jinja" in out or "template tokenizer" in out


def test_python_shows_a_dataset_of_chats_and_writes_its_page(inspect, folder, tmp_path, capsys):
    """`ps.inspect` with a folder and with an open dataset, against the verb."""
    shown = inspect("chats", "--document", "3")[1]
    ps.inspect(folder / "chats", documents=[3])
    found = capsys.readouterr().out
    assert "Gate 3 is shut." in found
    assert found == shown.replace("chats  chats", f"chats  {folder / 'chats'}")
    pages = tmp_path / "verb.html", tmp_path / "python.html"
    inspect("chats", "--html", str(pages[0]), "--sequence-length", "64")
    ps.inspect(ps.open_dataset(folder / "chats"), html=pages[1], sequence_length=64)
    expected, data = (data_of(page) for page in pages)
    assert data["rows"]
    assert (data["rows"], data["sides"][0]["documents"]) == (
        expected["rows"],
        expected["sides"][0]["documents"],
    )
    with pytest.raises(ConfigError, match=r"mask_history.*chats"):
        ps.inspect(ps.open_dataset(folder / "chats"), mask_history=True)


def test_a_loader_is_shown_over_all_ranks_and_stays_where_it_is(folder, capsys):
    settings = {"sequence_length": 64, "rows_per_step": 4, "seed": 3}
    ps.inspect(ps.Loader(folder / "chats", **settings), step=1, rows=[3])
    shown = capsys.readouterr().out
    needs = ps.InputRequirements(asked_by="a loop", positions=True, prefix=False)
    loader = ps.Loader(folder / "chats", **settings, data_parallel=(1, 2), requirements=needs)
    steps = iter(loader)
    assert next(steps).index == 0
    ps.inspect(loader, step=1, rows=[3])
    assert capsys.readouterr().out == shown
    assert "row 3" in shown
    assert next(steps).index == 1, "an iterator under way goes on"


def test_for_a_machine(inspect):
    found = json.loads(inspect("chats.jsonl", "-t", "tokenizer", "--json")[1])
    assert found["summary"]["proven"] == "12"
    assert found["refused"][0]["origin"] == "chats.jsonl:13"
    assert found["settings"]["template"] == "tokenizer"


@pytest.mark.parametrize(
    "arguments",
    [
        ["chats.jsonl", "-t", "tokenizer", "--documents", "500"],
        ["chats"],
        ["texts", "--rows", "1"],
        ["run.yaml"],
    ],
)
def test_a_machine_gets_its_json_beside_a_page(inspect, tmp_path, arguments):
    page = tmp_path / "page.html"
    code, out, err = inspect(*arguments, "--html", str(page), "--json")
    assert code == 0
    assert out == inspect(*arguments, "--json")[1]
    assert json.loads(out)
    assert err.startswith(f"{page}: ")
    assert data_of(page)["title"]


def test_settings_of_chats_come_from_options(inspect):
    given = ["--roles-to-train", "user,assistant", "--no-train-on-reasoning", "--max-tokens", "99"]
    settings = json.loads(inspect("chats.jsonl", "-t", "tokenizer", *given, "--json")[1])[
        "settings"
    ]
    assert settings["roles_to_train"] == "user+assistant"
    assert settings["train_on_reasoning"] == "no"
    assert settings["max_tokens"] == "99"
    assert settings["mask_history"] == "no"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["chats.jsonl"],
            "chats.jsonl: raw records; to show conversations set --tokenizer and --template",
        ),
        (
            ["chats.jsonl", "--template", "chat.jinja"],
            "raw conversations need a tokenizer: set --tokenizer",
        ),
        (
            ["chats.jsonl", "-t", "tokenizer", "--set", "mask_histroy=1"],
            "did you mean 'mask_history'",
        ),
        (
            ["chats.jsonl", "-t", "tokenizer", "--template", "none.jinja"],
            "none.jinja: no chat template there",
        ),
        (
            ["chats.jsonl", "-t", "tokenizer", "--document", "13"],
            "there is no record 13; the input has 13, numbered from 0",
        ),
        (["none.jsonl", "-t", "tokenizer"], "none.jsonl: no such file"),
        (["chats", "--html", "nowhere/page.html"], "nowhere/page.html: the page cannot be written"),
        (["run.yaml", "--html", "page.html", "--row", "9"], "row 9: the step has rows 0 to 3"),
        (["run.yaml", "--list"], "--list shows a list of documents in a terminal"),
        (["chats", "--list", "--json"], "leave out rows and JSON, and name a dataset"),
    ],
)
def test_errors_name_the_cure(inspect, arguments, message):
    code, _, err = inspect(*arguments)
    assert code == 1
    assert message in err


def test_a_file_of_bare_tokens_is_told_its_type(inspect, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # for paths of any length
    path = tmp_path / "tokens.npy"
    np.array([5, 6, 0, 7, 0], np.uint16).tofile(path)
    code, _, err = inspect(str(path))
    assert code == 1
    assert "set dtype ('uint16' or 'uint32') and eos_id" in err
    told = [str(path), "--dtype", "uint16", "--eos-id", "0"]
    code, out, err = inspect(*told, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["documents"], found["tokens"]) == (2, 5)
    assert [len(one["tokens"]) for one in found["shown"]] == [3, 2]
    code, out, _ = inspect(*told, "--rows", "1", "--sequence-length", "8", "-t", "tokenizer")
    assert code == 0
    assert "tokens.npy" in out
    assert inspect(*told, "--html", str(tmp_path / "page.html"))[0] == 0
    assert data_of(tmp_path / "page.html")["rows"]


def test_rows_that_an_objective_rewrote(inspect, folder, tmp_path):
    run = folder / "infill.yaml"
    objective = "{kind: infill, rate: 1, spm_rate: 0, tokens: [300, 301, 302]}"
    run.write_text(
        f"data:\n  sources:\n    - {{path: texts, objective: {objective}}}\n"
        "  loader: {sequence_length: 128, rows_per_step: 2}\n"
    )
    code, out, _ = inspect(str(run), "--slots", "0:2")
    assert code == 0
    for part in (
        "texts  PSM",
        "▌prefix",
        "▌suffix",
        "▌middle",
        "▌as it was",
        "sentinel of span 0",
        "prefix token",
    ):
        assert part in out
    code, out, err = inspect(str(run), "--json", "--html", str(tmp_path / "page.html"))
    assert code == 0, err
    (row,) = json.loads(out)
    assert row["tasks"] == {"PSM": len(row["documents"])}
    assert "".join(text for text, _ in row["documents"][0]["restored"]).startswith("Water level")
    page = data_of(tmp_path / "page.html")
    assert page["rows"][0]["documents"][0]["task"] == "PSM"
    assert {"name": "tasks of texts, by document", "parts": [["PSM", 1]]} in page["shares"]


@pytest.fixture
def parts(folder):
    """The texts in two parts, `half-a` and `half-b`."""
    texts = (folder / "texts.jsonl").read_text().splitlines(keepends=True)
    for name, some in (("a", texts[:15]), ("b", texts[15:])):
        if not (folder / f"half-{name}").exists():
            (folder / f"{name}.jsonl").write_text("".join(some))
            prepare_here(
                str(folder / f"{name}.jsonl"), folder / "tokenizer", folder / f"half-{name}"
            )


def test_a_glob_is_one_corpus(inspect, parts, folder, tmp_path):
    whole, joined = (json.loads(inspect(target, "--json")[1]) for target in ("texts", "half-*"))
    for figure in (
        "documents",
        "tokens",
        "trained_tokens",
        "text_bytes",
        "length_quantiles",
        "tokenizer",
    ):
        assert joined[figure] == whole[figure], figure
    assert (joined["shards"], joined["path"]) == (2, "half-a and 1 more")
    code, out, _ = inspect("half-*", "--document", "17")
    assert (code, "b.jsonl:3" in out) == (0, True)
    assert inspect("half-*", "--document", "20")[2].startswith(
        "penstock: half-*: no document 20; it has 20, from 0"
    )
    assert inspect("half-*", "--rows", "1", "--tokenizer", "tokenizer")[0] == 0
    assert inspect("half-*", "--html", str(tmp_path / "page.html"))[0] == 0
    assert inspect("chat*.jsonl", "--tokenizer", "tokenizer")[0] == 0


def test_a_run_file_of_joined_sources_is_planned_and_shown(
    folder, parts, inspect, monkeypatch, capsys
):
    run_file = folder / "joined.yaml"
    run_file.write_text(
        (folder / "run.yaml")
        .read_text()
        .replace("path: texts", "path: [half-a, half-b], name: texts")
    )
    assert inspect("joined.yaml")[0] == 0
    plans = []
    for name in ("run.yaml", "joined.yaml"):
        monkeypatch.setattr("sys.argv", ["penstock", "plan", name, "--steps", "5", "--json"])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0]["sources"] == plans[1]["sources"]


def test_verify_takes_several_and_globs(folder, parts, monkeypatch, capsys):
    def verify(*arguments):
        monkeypatch.setattr("sys.argv", ["penstock", "verify", *arguments])
        with pytest.raises(SystemExit, match=r"\d") as stop:
            cli.main()
        return int(stop.value.code), capsys.readouterr().out

    monkeypatch.chdir(folder)
    code, out = verify("half-*", "texts", "--json")
    assert (code, [(one["path"], one["sound"]) for one in json.loads(out)]) == (
        0, [("half-a", True), ("half-b", True), ("texts", True)],
    )  # fmt: skip
    assert json.loads(verify("texts", "--json")[1])["path"] == "texts"
    (shard,) = (folder / "half-b").glob("*.arrow")
    kept = shard.read_bytes()
    shard.write_bytes(kept[:100] + bytes([kept[100] ^ 1]) + kept[101:])
    code, out = verify("half-*")
    shard.write_bytes(kept)
    assert code == 1
    assert out.count("FAULT") == out.count(f"{shard.name}") > 0


def test_columns_is_the_width_where_the_output_is_no_terminal(inspect, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert len(inspect("chats", "--rows", "1")[1].splitlines()[1]) == 118
    monkeypatch.setenv("COLUMNS", "60")
    assert 58 in map(len, inspect("chats", "--rows", "1")[1].splitlines()[:4])
