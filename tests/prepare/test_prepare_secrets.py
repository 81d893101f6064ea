"""Secrets of URLs reach no file, no message and no output: user info and signatures serve to open,
and nothing else.
"""

import json

import pytest

from makers.datasets import prepare_here
from makers.forked import run_penstock
from makers.secret_server import (
    SECOND,
    SECRETS,
    SIGNATURE,
    found_secrets,
    leaks,
    printed,
    secret_server,
)
from penstock import open_dataset
from penstock.core.errors import ConfigError, PenstockError, RecordError
from penstock.data.reports import PrepareReport
from penstock.data.sources import open_sources
from penstock.use.cli import main

pytest.importorskip("aiohttp")


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "served").mkdir()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with secret_server(tmp_path / "served", monkeypatch) as running:
        yield running


def put(server, name, texts, bad=()):
    lines = [json.dumps({"text": text}) for text in texts] + list(bad)
    (server.folder / name).write_text("".join(f"{line}\n" for line in lines))


def words(count, start=0):
    return [f"the water never stops {number}" for number in range(start, start + count)]


def in_a_process(*arguments):
    """The command line in a process of its own: its status, and all that it prints."""
    ran = run_penstock(*arguments)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture
def penstock(monkeypatch, capfd):
    """Runs the command line in this process: its status, and all that it and its children print."""

    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit, match=r"^\d$") as ended:
            main()
        return int(ended.value.code or 0), "".join(capfd.readouterr())

    return call


def shown(server, kind, name):
    return f"http://127.0.0.1:{server.server_port}/{kind}/{name}"


@pytest.mark.parametrize("kind", ["private", "signed"])
def test_the_command_line_keeps_a_secret(server, tokenizer, tmp_path, penstock, kind):
    """Prepare with rejects in two processes, repeat, verify, inspect and copy; then grep."""
    put(server, "a.jsonl", words(400), bad=["{broken"])
    put(server, "b.jsonl", words(300, 400))
    tokenizer.save(tmp_path / "tokenizer")
    urls = [getattr(server, kind)(name) for name in ("a.jsonl", "b.jsonl")]
    options = [
        "--tokenizer",
        tmp_path / "tokenizer",
        "--output",
        tmp_path / "out",
        "--on-error",
        "skip",
    ]
    options += ["--part-bytes", 5000, "--processes", 2]
    for run in (in_a_process, penstock):
        code, said = run("prepare", *urls, *options)
        assert (code, found_secrets(said)) == (0, []), said
    assert "nothing to do" in said
    for verb, *more in (["verify"], ["inspect"], ["copy", tmp_path / "c"]):
        code, said = penstock(verb, tmp_path / "out", *more)
        assert (code, found_secrets(said)) == (0, []), said
    assert leaks(tmp_path) == {}
    dataset = open_dataset(tmp_path / "out")
    assert {str(dataset[number].origin) for number in (0, 699)} == {
        f"{shown(server, kind, 'a.jsonl')}:1", f"{shown(server, kind, 'b.jsonl')}:300"
    }  # fmt: skip
    (reject,) = (tmp_path / "out/rejected.jsonl").read_text().splitlines()
    assert json.loads(reject)["file"] == shown(server, kind, "a.jsonl")


def test_a_file_that_was_signed_again_is_the_same(server, tokenizer, tmp_path):
    put(server, "a.jsonl", words(300))
    first = prepare_here(server.signed("a.jsonl"), tokenizer, tmp_path / "out", part_bytes=2000)
    server.signatures = {SECOND}
    again = prepare_here(
        server.signed("a.jsonl", SECOND), tokenizer, tmp_path / "out", part_bytes=2000
    )
    assert (again.seconds, again.input) == (None, first.input)
    assert leaks(tmp_path) == {}


def test_a_killed_preparation_goes_on_with_a_new_signature(server, tokenizer, tmp_path):
    put(server, "a.jsonl", words(300))
    put(server, "b.jsonl", words(300, 300), bad=["{broken"])

    def urls(signature):
        return [server.signed(name, signature) for name in ("a.jsonl", "b.jsonl")]

    with pytest.raises(RecordError, match=r"/signed/b.jsonl:301: not JSON") as failed:
        prepare_here(urls(SIGNATURE), tokenizer, tmp_path / "out", part_bytes=2000)
    assert leaks(tmp_path) == {}
    server.signatures = {SECOND}
    report = prepare_here(
        urls(SECOND), tokenizer, tmp_path / "out", part_bytes=2000, on_error="skip"
    )
    assert (report.parts_resumed > 2, report.documents) == (True, 600)
    assert (leaks(tmp_path), found_secrets(printed(failed.value))) == ({}, [])


def test_other_parameters_choose_the_content(server, tokenizer, tmp_path):
    """Two files that differ only in their query are two; a token besides changes nothing."""
    server.etags = False
    for number in (1, 2):
        put(server, f"down.{number}", [f"number {number} {text}" for text in words(50)])
    urls = [server.open(f"down?id={number}&token={SIGNATURE}") for number in (1, 2)]
    both = prepare_here(urls, tokenizer, tmp_path / "both", format="jsonl")
    assert both.documents == 100
    names = {
        str(document.origin).rpartition(":")[0] for document in open_dataset(tmp_path / "both")
    }
    assert len(names) == 2
    assert all(name.startswith(f"{server.open('down')}#") for name in names)
    one = prepare_here(urls[0], tokenizer, tmp_path / "one", format="jsonl")
    same = prepare_here(
        server.open(f"down?token=other{SECOND}&id=1"), tokenizer, tmp_path / "one", format="jsonl"
    )
    assert (one.seconds is None, same.seconds) == (False, None)
    other = prepare_here(urls[1], tokenizer, tmp_path / "one", format="jsonl")
    assert (other.seconds is None, other.splits[""].fingerprint == one.splits[""].fingerprint) == (
        False,
        False,
    )
    assert {
        str(document.origin).rpartition(":")[0] for document in open_dataset(tmp_path / "one")
    } == {server.open("down")}
    with pytest.raises(ConfigError, match=r"/open/down.*\(URLs.*differ.*signature"):
        open_sources([urls[0], server.open("down?id=1&token=x")], format="jsonl")
    assert leaks(tmp_path) == {}


@pytest.mark.parametrize("status", [401, 403, 404, 410, 500, 503])
@pytest.mark.parametrize("kind", ["private", "signed"])
def test_a_server_that_refuses(server, tokenizer, tmp_path, capsys, kind, status):
    """At the first look, and in the middle of the work."""
    put(server, "a.jsonl", words(2000))
    url = getattr(server, kind)("a.jsonl")
    server.status["a.jsonl"] = status
    with pytest.raises(RecordError, match=rf"/{kind}/a.jsonl: .*(read|no such file)") as refused:
        prepare_here(url, tokenizer, tmp_path / "out", progress=True)
    server.status.clear()
    parts = open_sources(url, part_bytes=2000)
    server.status["a.jsonl"] = status
    with pytest.raises(RecordError, match=rf"/{kind}/a.jsonl: .*(be read|not in)") as later:
        list(parts[3].blocks())
    said = (
        printed(refused.value) + printed(later.value) + repr(parts) + "".join(capsys.readouterr())
    )
    assert (found_secrets(said), leaks(tmp_path)) == ([], {})


def test_a_redirect_to_a_signed_address_that_fails(server, tokenizer, tmp_path):
    put(server, "a.jsonl", words(20))
    server.signatures = set()
    url = f"http://127.0.0.1:{server.server_port}/moved/a.jsonl"
    with pytest.raises(RecordError, match=r"/moved/a.jsonl: the store cannot be read") as refused:
        prepare_here(url, tokenizer, tmp_path / "out")
    assert found_secrets(printed(refused.value)) == []


def test_a_host_that_does_not_answer(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    for url in (
        f"http://reader:{SECRETS[2]}@127.0.0.1:9/a.jsonl",
        f"https://127.0.0.1:9/a.jsonl?sig={SIGNATURE}",
        f"http://reader:{SECRETS[0]}@127.0.0.1:9/a.jsonl",
        f"http://[::1/a.jsonl?sig={SIGNATURE}",
        f"nonesuch://reader:{SECRETS[2]}@host/a.jsonl",
        f"ftp://reader:{SECRETS[2]}@127.0.0.1:9/a.jsonl",
        f"zip://a.jsonl::http://reader:{SECRETS[2]}@127.0.0.1:9/a.zip?sig={SIGNATURE}",
    ):
        with pytest.raises(PenstockError, match=r"a\.(jsonl|zip)?") as refused:
            prepare_here(url, tokenizer, tmp_path / "out")
        assert found_secrets(printed(refused.value)) == [], url


def test_a_dataset_on_a_web_server(server, tokenizer, tmp_path, penstock):
    """Opened, its rows read, copied and verified with a password, and with a signature for its
    folder.
    """
    put(server, "a.jsonl", words(300))
    local = prepare_here(server.folder / "a.jsonl", tokenizer, server.folder / "data")
    for url in (server.private("data"), server.signed("data")):
        remote = open_dataset(url, cache=tmp_path / "cache")
        assert remote == open_dataset(server.folder / "data")
        assert (found_secrets(repr(remote) + str(remote.url)), remote.url) == (
            [],
            str(remote.address),
        )
        for verb in (
            ["verify", url],
            ["inspect", url],
            ["copy", url, tmp_path / f"copy {remote.url[-12:-5]}"],
        ):
            code, said = penstock(*verb)
            assert (code, found_secrets(said)) == (0, []), said
        server.status["lengths.u32"] = 403
        code, said = penstock("copy", url, tmp_path / "another")
        assert (code, found_secrets(said)) == (1, []), said
        server.status.clear()
    assert local.documents == 300
    assert leaks(tmp_path) == {}


def test_user_info_of_s3_is_a_key(store, corpus, tokenizer, tmp_path, capsys):
    """It opens the store, of sources and of datasets, and is stored nowhere."""
    secret = "tests:t3sts/s3cr3t+K"
    name = next(corpus.glob("*.jsonl"))
    (store.folder / "bucket" / name.name).write_bytes(name.read_bytes())
    report = prepare_here(
        f"s3://{secret}@bucket/{name.name}",
        tokenizer,
        f"s3://{secret}@bucket/web",
        progress=True,
        part_bytes=9000,
    )
    assert isinstance(report, PrepareReport)
    assert (report.output, report.splits[""].path) == ("s3://bucket/web", "s3://bucket/web")
    dataset = open_dataset(f"s3://{secret}@bucket/web", cache=tmp_path / "cache")
    assert dataset == open_dataset("s3://bucket/web", cache=tmp_path / "cache")
    assert str(dataset[0].origin) == f"s3://bucket/{name.name}:1"
    store.fail("403", ending="manifest.json")
    with pytest.raises(PenstockError, match="s3://bucket/web") as refused:
        open_dataset(f"s3://{secret}@bucket/web")
    said = (
        "".join(capsys.readouterr())
        + printed(refused.value)
        + repr(report)
        + repr(dataset)
        + str(report)
    )
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not [piece for piece in ("t3sts", "s3cr3t") if piece in said or piece.encode() in kept]
