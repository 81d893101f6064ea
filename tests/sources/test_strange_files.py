"""Paths that are no plain files, or that are one file twice: a sentence each, and nothing hangs."""

import os
import socket
import subprocess
import sys
import tempfile

import pytest

from penstock.core.errors import ConfigError, RecordError
from penstock.data.sources import open_sources, read_texts

LINE = '{"text": "a"}\n'


def test_one_file_under_two_names(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINE)
    os.link(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    for spec in (tmp_path, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], f"{tmp_path}/*.jsonl"):
        with pytest.raises(
            ConfigError,
            match=r"b.jsonl: is the same file as \S+a.jsonl",
        ):
            open_sources(spec)
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"c.jsonl: is the same file as \S+a.jsonl"):
        open_sources(tmp_path)
    with pytest.raises(ConfigError, match=r"a.jsonl: is given twice"):
        open_sources([tmp_path / "a.jsonl"] * 2)
    (tmp_path / "c.jsonl").unlink()
    (tmp_path / "c.jsonl").write_text(LINE)
    assert list(read_texts(open_sources(tmp_path))) == ["a", "a"], (
        "files with the same text are two"
    )


def test_a_folder_by_two_ways(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.jsonl").write_text(LINE)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match=r"is the same file as"):
        open_sources([tmp_path / "real", tmp_path / "link"])


def test_pipes_sockets_and_devices(tmp_path, monkeypatch):
    """Opening a FIFO waits for a writer; a child of a shell would read nothing, or another file."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(RecordError, match=r"a.jsonl.*pipe.*write.*first"):
        open_sources(tmp_path / "a.jsonl")
    with pytest.raises(RecordError, match=r"a.jsonl: is a pipe"):
        open_sources(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the path of a socket is short
        server.bind("b.jsonl")
        with pytest.raises(RecordError, match=r"b.jsonl: is a socket"):
            open_sources("b.jsonl")
    with pytest.raises(RecordError, match=r"/dev/null: is a device"):
        open_sources("/dev/null", format="jsonl")


def test_process_substitution():
    """Bash hands over /dev/fd/63."""
    code = (
        "import sys\nfrom penstock.data.sources import open_sources\nopen_sources(sys.argv[1], "
        "format='text')"
    )
    found = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" <(echo hello)', sys.executable, code],
        capture_output=True,
        text=True,
    )
    assert "is a pipe, which can be read only once" in found.stderr


def test_files_in_shared_memory():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.NamedTemporaryFile("w", dir="/dev/shm", suffix=".jsonl") as file:
        file.write(LINE)
        file.flush()
        assert list(read_texts(open_sources(file.name))) == ["a"]


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINE)
    (tmp_path / "b.jsonl").symlink_to("absent.jsonl")
    due = (
        r"b.jsonl: is a link to absent.jsonl, which does not exist; remove the link, or put the "
        r"file back"
    )
    for spec in (f"{tmp_path}/*.jsonl", tmp_path, tmp_path / "b.jsonl"):
        with pytest.raises(RecordError, match=due):
            open_sources(spec)
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "b.jsonl").symlink_to("b.jsonl")
    with pytest.raises(RecordError, match=r"b.jsonl.*leads.*itself.*remove"):
        open_sources(f"{tmp_path}/*.jsonl")


def test_folders_without_end(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(LINE)
    for name in ("one", "two"):
        (tmp_path / "in" / name).symlink_to(tmp_path)
    for spec in (tmp_path, f"{tmp_path}/**/*.jsonl", f"{tmp_path}/in/**"):
        with pytest.raises(
            RecordError,
            match=r"one/in|one: .*contains it, an endless",
        ):
            open_sources(spec)


def test_what_may_not_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(LINE)
    parts = open_sources(tmp_path)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path / "a.jsonl"))

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(RecordError, match=r"a.jsonl.*permissions"):
        open_sources(tmp_path / "a.jsonl")
    monkeypatch.undo()
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(RecordError, match=r"a.jsonl: may not be read by this user"):
        list(read_texts(parts))
    monkeypatch.undo()
    scandir = os.scandir

    def refuse_inner(path="."):
        return refuse() if str(path).endswith("inner") else scandir(path)

    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(os, "scandir", refuse_inner)
    with pytest.raises(RecordError, match="may not be read by this user"):
        open_sources(tmp_path)


def test_names_that_are_not_utf8(tmp_path):
    name = os.fsencode(str(tmp_path)) + b"/\xff.jsonl"
    with open(name, "w") as file:
        file.write(LINE)
    with pytest.raises(RecordError, match=r"udcff.jsonl'.*UTF-8.*rename"):
        open_sources(tmp_path)


def test_hints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spec, due in (
        (
            "HuggingFaceFW/fineweb",
            r"a dataset of the Hugging Face hub is written hf://datasets/HuggingFaceFW/fineweb$",
        ),
        ("absent/*.jsonl", "quote globs so that the shell does not expand them"),
        ("./absent.jsonl", "check the spelling$"),
        ("some text", r"pass an iterator: iter\(texts\)"),
    ):
        with pytest.raises(RecordError, match=due):
            open_sources(spec)


@pytest.mark.parametrize(
    ("separator", "expected"), [("\n", ["one", "two ", "three"]), ("\n\n", ["one", "two \nthree"])]
)
def test_blank_lines_between_documents(tmp_path, separator, expected):
    content = (
        "one\n\n\ntwo \n\t\nthree\n\n" if separator == "\n" else "one\n\n\n\ntwo \nthree\n\n\n\n"
    )
    (tmp_path / "a.txt").write_text(content)
    (part,) = open_sources(tmp_path, separator=separator)
    (block,) = part.blocks()
    assert (block.texts.to_pylist(), block.rejects) == (expected, [])
    assert block.lines.tolist() == ([1, 4, 6] if separator == "\n" else [1, 5])
