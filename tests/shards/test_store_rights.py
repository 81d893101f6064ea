"""S3 with few rights, and with credentials that end: what opens, what goes on, and what is said."""

import json

import numpy as np
import pytest

from makers.object_store import s3_store
from makers.processes import call_penstock
from makers.texts import make_texts
from makers.tokenizers import tiny_tokenizer
from penstock import Loader, Source, open_dataset, prepare
from penstock.core.errors import FormatError, StoreError
from penstock.data.shards import verify
from penstock.data.shards.copying import copy_dataset
from penstock.data.stores.store import Store

URL = "s3://bucket/chats"
CREDENTIALS = """\
[default]
aws_access_key_id = {key}
aws_secret_access_key = secret
aws_session_token = token-{key}
"""
EXPIRED = ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store's folder with a dataset of chats."""
    root = tmp_path_factory.mktemp("store")
    tiny_tokenizer(root / "tokenizer", make_texts(200), 340, ["<|im_start|>", "<|im_end|>"])
    texts = make_texts(600)
    chats = [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]}
        for one, other in zip(texts[::2], texts[1::2], strict=True)
    ]
    (root / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    target = root / "store" / "bucket" / "chats"
    prepare(
        root / "a.jsonl",
        tokenizer=root / "tokenizer",
        output=target,
        template="chatml",
        progress=False,
    )
    return root / "store"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.data.stores.store.PAUSE_SECONDS", 0.01)


@pytest.fixture
def store(folder, monkeypatch):
    pytest.importorskip("s3fs")
    with s3_store(folder, monkeypatch) as found:
        yield found


def test_a_dataset_opens_without_the_right_to_list(store, folder, tmp_path):
    store.may_list = False
    local = open_dataset(folder / "bucket" / "chats")
    for _ in range(2):
        remote = open_dataset(URL)
        assert remote == local
        assert [remote[n] for n in range(0, 300, 17)] == [local[n] for n in range(0, 300, 17)]
        assert remote.chat == local.chat
        assert (
            remote.loaded_tokenizer.encode("water").tolist()
            == local.loaded_tokenizer.encode("water").tolist()
        )
    steps = [
        next(iter(Loader(Source(one, name="c"), sequence_length=64, rows_per_step=4)))
        for one in (local.path, URL)
    ]
    np.testing.assert_array_equal(steps[0][0].tokens, steps[1][0].tokens)
    assert verify(URL).sound
    copy_dataset(URL, tmp_path / "copy")
    assert open_dataset(tmp_path / "copy") == local
    assert verify(tmp_path / "copy").sound
    assert call_penstock("inspect", URL, "--json").exit_code == 0


def test_what_is_not_there_names_the_rights(store):
    store.may_list = False
    with pytest.raises(
        (StoreError, FormatError), match=r"nothing.*s3:GetObject.*s3:ListBucket"
    ) as found:
        open_dataset("s3://bucket/nothing")
    assert "not there" in str(found.value)
    with pytest.raises(StoreError, match=r"s3://bucket.*listing.*s3:ListBucket"):
        Store("s3://bucket").listing()


@pytest.fixture
def credentials(store, tmp_path, monkeypatch):
    """Writes a credentials file with a key, and none in the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(key):
        (tmp_path / "credentials").write_text(CREDENTIALS.format(key=key))

    write("old")
    return write


@pytest.mark.parametrize("code", EXPIRED)
@pytest.mark.parametrize("fast", [True, False])
def test_keys_that_were_replaced_before_they_ended(
    store, folder, credentials, code, fast, monkeypatch
):
    if not fast:
        monkeypatch.setattr("penstock.data.stores.store.FastReads.of", lambda files: None)
    local = open_dataset(folder / "bucket" / "chats")
    remote = open_dataset(URL)
    assert remote[0] == local[0]
    credentials("new")
    store.keys["old"] = code
    assert [remote[n] for n in range(300)] == [local[n] for n in range(300)]
    assert remote.table.read(0, 300).values.tolist() == local.table.read(0, 300).values.tolist()
    assert open_dataset(URL)[299] == local[299]
    # And once more.
    credentials("newer")
    store.keys["new"] = code
    assert (
        Store(URL).read("manifest.json")
        == (folder / "bucket" / "chats" / "manifest.json").read_bytes()
    )


def test_a_run_goes_on_while_keys_change(store, folder, credentials):
    loaders = [
        Loader(Source(one, name="c", max_epochs=1), sequence_length=64, rows_per_step=2, threads=2)
        for one in (folder / "bucket" / "chats", URL)
    ]
    count = 0
    for number, (mine, theirs) in enumerate(zip(*loaders, strict=True)):
        if number == 3:
            credentials("new")
            store.keys["old"] = "ExpiredToken"
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
        count += 1
    assert count > 20


def test_keys_that_ended_and_have_no_others(store, credentials, monkeypatch):
    remote = open_dataset(URL)
    store.keys["old"] = "ExpiredToken"
    before = len(store.log)
    message = (
        r"the store refuses: .*renew the credentials \(a new session finds no others in the "
        r"environment, the cred"
    )
    with pytest.raises(StoreError, match=message):
        remote[5]
    assert len(store.log) < before + 20, "it was not tried for ever"
    credentials("other")
    store.keys["other"] = "ExpiredToken"
    with pytest.raises(StoreError, match=r"credentials.*session"):
        remote[5]
    credentials("third")
    assert remote[5].tokens.size


def test_a_right_that_is_missing_makes_no_new_session(store, credentials):
    remote = open_dataset(URL)
    store.fail("403", 10**6, ".arrow")
    with pytest.raises(StoreError, match=r"refuses.*check.*credentials"):
        remote[5]
