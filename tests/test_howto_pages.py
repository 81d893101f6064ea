"""How-to pages: run files that load, commands and code that exist, both sides of a migration that
mean the same.
"""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import penstock as ps
from makers.pages import models
from penstock.use.cli import VERBS, build_app
from penstock.use.config import load_run
from penstock.use.config.imports.conversion import import_axolotl
from penstock.use.config.imports.reading import import_config

FOLDER = Path(__file__).parents[1] / "docs" / "how-to"
PAGES = [
    *sorted(page for page in (FOLDER / "migrate").glob("*.md") if page.stem != "index"),
    *(FOLDER / f"{name}.md" for name in ("memory-and-speed", "wrong-loss", "recipes")),
]
NOT_RUN = [page for page in sorted((FOLDER.parent / "tutorials").glob("*.md")) if models(page)]
"""Tutorials with real models, which CI does not run."""
COMMANDS: Any = get_command(build_app([]))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def commands(page: Path) -> list[list[str]]:
    """Words of every penstock command of a page, in blocks of shell and in the heads of run
    files.
    """
    text = "\n".join([*blocks(page, "bash"), *blocks(page, "yaml")]).replace("\\\n", " ")
    found = [
        line for line in text.splitlines() if re.search(rf"penstock ({'|'.join(VERBS)}) ", line)
    ]
    plain = [re.sub(r" [|>&].*", "", line) for line in found]  # without where its output goes
    return [
        shlex.split(line[re.search(r"penstock [a-z]", line).start() :], comments=True)
        for line in plain
    ]  # type: ignore[union-attr]


def test_there_is_a_page_for_each_way_here() -> None:
    assert "real-model" in {page.stem for page in NOT_RUN}
    assert {page.stem for page in PAGES} >= {
        "axolotl",
        "llama-factory",
        "trl",
        "megatron",
        "fast-llm",
        "nemo-rl",
        "nanochat",
        "recipes",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_run_files_load(page: Path, tmp_path: Path) -> None:
    ours = [text for text in blocks(page, "yaml") if text.startswith("# penstock")]
    assert ours
    for text in ours:
        (tmp_path / "run.yaml").write_text(text)
        assert load_run(tmp_path / "run.yaml").model is not None
    for text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("page", [*PAGES, *NOT_RUN], ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    found = commands(page)
    assert found or page.stem in ("wrong-loss",)
    for words in found:
        command, rest = COMMANDS.commands[words[1]], words[2:]
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        command.make_context(words[1], rest)


@pytest.mark.parametrize("page", [*PAGES, *NOT_RUN], ids=lambda page: page.stem)
def test_names_of_python_exist(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)
        for name in re.findall(r"\bps\.([a-z_]\w*)", text, re.IGNORECASE):
            assert name in ps.__all__
    for name in re.findall(r"`ps\.([a-z_A-Z]\w*)", page.read_text(encoding="utf-8")):
        assert name in ps.__all__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_short_and_have_one_title(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# ", plain, re.MULTILINE)) == 1
    assert not re.search(r"^```$\n(?!\n|$)", plain, re.MULTILINE)


def test_both_sides_of_the_axolotl_page_mean_the_same(tmp_path: Path) -> None:
    theirs, ours = blocks(FOLDER / "migrate" / "axolotl.md", "yaml")
    (tmp_path / "axolotl.yaml").write_text(theirs)
    (tmp_path / "ours.yaml").write_text(ours)
    (tmp_path / "made.yaml").write_text(
        import_axolotl(tmp_path / "axolotl.yaml").text("axolotl.yaml")
    )
    assert load_run(tmp_path / "made.yaml") == load_run(tmp_path / "ours.yaml")


def test_both_sides_of_the_llama_factory_page_mean_the_same(tmp_path: Path) -> None:
    theirs, ours = blocks(FOLDER / "migrate" / "llama-factory.md", "yaml")
    about = re.search(r"# (\{.*(?:\n#.*)*\})\n", theirs)
    assert about is not None
    (tmp_path / "dataset_info.json").write_text(about[1].replace("\n#", "\n"))
    (tmp_path / "theirs.yaml").write_text(theirs)
    (tmp_path / "ours.yaml").write_text(ours)
    found = import_config(tmp_path / "theirs.yaml")
    (tmp_path / "made.yaml").write_text(found.text("theirs.yaml"))
    assert load_run(tmp_path / "made.yaml") == load_run(tmp_path / "ours.yaml")


def test_code_of_the_loss_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from makers.datasets import prepare_here
    from makers.texts import make_texts
    from makers.tokenizers import tiny_tokenizer

    monkeypatch.chdir(tmp_path)
    tiny_tokenizer(tmp_path / "tokenizer", make_texts(100), 300)
    prepare_here(iter(make_texts(2000)), tmp_path / "tokenizer", tmp_path / "data/chats")
    for text in blocks(FOLDER / "wrong-loss.md", "python"):
        exec(text, {})


def test_spans_of_fast_llm_become_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of its page: characters are trained that no span covers, the end of a span included
    in it.
    """
    from makers.texts import make_texts, write_json_lines
    from makers.tokenizers import tiny_tokenizer

    monkeypatch.chdir(tmp_path)
    tiny_tokenizer(tmp_path / "made", make_texts(100), 300)
    (tmp_path / "made" / "tokenizer.json").rename("tokenizer.json")
    text = "hello world, grün"
    spans: list[Any] = [
        [[0, 4]],
        [],
        None,
        [[0, len(text) - 1]],
        [[6, 6], [12, 30]],
        [[9, 11], [3, 4], [4, 10]],
        [[0, 0], [1, 1]],
    ]
    write_json_lines(
        tmp_path / "raw.jsonl", [{"text": text, "loss_masking_spans": one} for one in spans]
    )
    names: dict[str, Any] = {}
    exec(blocks(FOLDER / "migrate" / "fast-llm.md", "python")[0], names)
    for given in spans:
        masked = {at for begin, end in given or [] for at in range(begin, end + 1)}
        found = names["with_ranges"]({"text": text, "loss_masking_spans": given})["ranges"]
        assert [at for part in found for at in range(part["begin"], part["end"])] == [
            at for at in range(len(text)) if at not in masked
        ]
    assert "1 document of 7 trains nothing" in str(names["masked"].report)
    trained = [(document.loss_weights > 0).any() for document in ps.open_dataset("data/masked")]
    assert trained == [True, True, True, False, True, True, True]


def test_a_tokenizer_of_nanochat_keeps_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of its page, on a small encoding of the same form."""
    tiktoken = pytest.importorskip("tiktoken")
    import pickle

    monkeypatch.chdir(tmp_path)
    ranks = {bytes([byte]): byte for byte in range(256)} | {
        b"th": 256,
        b"the": 257,
        b" the": 258,
        b"ee": 259,
    }
    pattern = (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| "
        r"?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    special = {"<|bos|>": 260, "<|user_start|>": 261}
    encoding = tiktoken.Encoding(
        "rustbpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )
    Path("tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    exec(blocks(FOLDER / "migrate" / "nanochat.md", "python")[0], {})
    tokenizer = ps.load_tokenizer("tokenizer")
    for text in ("the wheel, the tree", "größe 1234 we're\n\n  x", "水🙂"):
        assert list(tokenizer.encode(text)) == encoding.encode(text, allowed_special=set())
    assert tokenizer.special_tokens["<|user_start|>"] == 261
