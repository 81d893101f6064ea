"""Training: any text can be encoded, on the fast path; transformers loads it; the same text gives
the same file.
"""

import json
from pathlib import Path

import pytest
from tiny_tokenizers import tokenizer_texts

from makers.forked import run_penstock
from makers.processes import run_code
from makers.texts import write_json_lines
from penstock import load_tokenizer, train_tokenizer
from penstock.core.errors import ConfigError, OutputError, TokenizerError


def test_trained_tokenizers_take_the_fast_path(trained: Path, hard_texts: list[str]) -> None:
    tokenizer = load_tokenizer(trained)
    assert tokenizer.special_tokens == {"<|bos|>": 0, "<|eos|>": 1, "<|pad|>": 2, "<|user|>": 3}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert tokenizer.check_encoder(hard_texts) is None
    assert (tokenizer.encoder, tokenizer.kind) == ("gigatoken", "byte-level BPE")


def test_bytes_that_were_never_seen_survive(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(
        ["plain ascii only"], vocab_size=270, output=tmp_path, progress=False
    )
    for text in ("Zürich é 日本 hello", "\x00\x7f\u0080\U0010ffff", "👩‍🚀"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_stand_alone(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(
        ["2024 2024 2024 1999"] * 50, vocab_size=300, output=tmp_path, progress=False
    )
    assert [tokenizer.byte_table[token_id] for token_id in tokenizer.encode("2024").tolist()] == [
        b"2",
        b"0",
        b"2",
        b"4",
    ]


def test_the_same_texts_give_the_same_file(tmp_path: Path, trained: Path) -> None:
    code = (
        "import sys; from tiny_tokenizers import tokenizer_texts\n"
        "from penstock import train_tokenizer\n"
        "options = {'special_tokens': ['<|user|>'], 'progress': False}\n"
        "train_tokenizer(tokenizer_texts(), vocab_size=400, output=sys.argv[1], **options)"
    )
    run_code(code, tmp_path, check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes()


def test_transformers_loads_it(trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(trained), load_tokenizer(trained)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    for text in tokenizer_texts(10):
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text).tolist()
        assert theirs.decode(ids) == text
    assert (
        theirs("a<|user|>b")["input_ids"] == ours.encode("a<|user|>b", allow_control=True).tolist()
    )


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size.*least 259.*3.*got 258"):
        train_tokenizer(["a"], vocab_size=258, output=tmp_path)
    with pytest.raises(ConfigError, match="special_tokens must be distinct"):
        train_tokenizer(["a"], vocab_size=300, output=tmp_path, special_tokens=["<|eos|>"])
    with pytest.raises(TokenizerError, match="no text to train on"):
        train_tokenizer(["", ""], vocab_size=300, output=tmp_path, progress=False)
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_tokenizer_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    train_tokenizer(["a b"], vocab_size=270, output=tmp_path / "t", progress=False)
    before = (tmp_path / "t" / "tokenizer.json").read_bytes()

    def unread():
        raise AssertionError("no text is read before the folder is looked at")
        yield ""

    with pytest.raises(OutputError, match=r"tokenizer.json.*already.*set"):
        train_tokenizer(unread(), vocab_size=270, output=tmp_path / "t", progress=False)
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() == before
    with pytest.raises(OutputError, match="cannot be made: Not a directory"):
        train_tokenizer(
            unread(),
            vocab_size=270,
            output=tmp_path / "t" / "tokenizer.json" / "in",
            progress=False,
        )
    train_tokenizer(
        ["cc dd"] * 9, vocab_size=270, output=tmp_path / "t", overwrite=True, progress=False
    )
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() != before


def test_progress_is_told_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_tokenizer(tokenizer_texts(5), vocab_size=270, output=tmp_path)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "reading text" in captured.err
    assert "learning merges" in captured.err


def test_the_command_trains_and_shows(tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    write_json_lines(source, ({"body": text} for text in tokenizer_texts()))
    options = [
        "--vocab-size",
        "300",
        "-o",
        str(tmp_path / "out"),
        "--special",
        "<|user|>",
        "--text-field",
        "body",
    ]
    done = run_penstock("tokenizer", "train", str(source), *options, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["vocab_size"], told["encoder"], told["byte_table"]) == (300, "gigatoken", True)
    shown = run_penstock("tokenizer", "show", str(tmp_path / "out"), "--json")
    assert json.loads(shown.stdout) == told
    assert told["special_tokens"]["<|user|>"] == 3
    plain = run_penstock("tokenizer", "show", str(tmp_path / "out"))
    assert "byte-level BPE, 300 ids" in plain.stdout
    assert "byte table" in plain.stdout


def test_the_command_skips_bad_records_where_asked(tmp_path: Path) -> None:
    for name, text in (("a", "one two"), ("b", ""), ("c", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    command = [
        "tokenizer",
        "train",
        str(tmp_path),
        "--vocab-size",
        "270",
        "--output",
        str(tmp_path / "out"),
    ]
    done = run_penstock(*command)
    assert (done.returncode, "b.txt:1: the document is empty" in done.stderr) == (1, True)
    assert "--on-error skip" in done.stderr
    done = run_penstock(*command, "--on-error", "skip")
    assert done.returncode == 0
    assert (
        f"bad records skipped: 2; the first: {tmp_path / 'b.txt'}:1: the document is empty"
        in done.stderr
    )
    done = run_penstock(*command, "--on-error", "ignore")
    assert "'--on-error'" in done.stderr
    assert "'ignore' is not one of" in done.stderr


def test_the_command_says_what_is_wrong() -> None:
    done = run_penstock("tokenizer", "show", "missing.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "missing.json: no such file or folder" in done.stderr
    assert "Traceback" not in done.stderr
