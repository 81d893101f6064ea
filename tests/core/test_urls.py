"""URLs as text: nothing secret is left of them, what they read stays told apart, and paths stay as
they are.
"""

import base64
import pickle
from pathlib import Path
from urllib.parse import quote

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import (
    MissingExtraError,
    OutputError,
    PenstockError,
    RecordError,
    StoreError,
)
from penstock.core.urls import (
    Address,
    found_below,
    fsspec_arguments,
    has_secrets,
    plain_cause,
    quoted,
    shown_url,
    shown_urls,
    shown_values,
    split_query,
    url_key,
    without_secrets,
)
from penstock.data.sources import open_sources, read_texts

SIGNED = {
    "AWS 4": "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F2026%2Fs3&X-Amz-Date=1&X-Amz-Expires=9&X-Amz-SignedHeaders=host&X-Amz-Security-Token=SECRET&X-Amz-Signature=SECRET",  # noqa: E501
    "AWS 2": "AWSAccessKeyId=AKIA&Expires=9&Signature=SECRET%3D",
    "GCS 4": "X-Goog-Algorithm=GOOG4&X-Goog-Credential=a%40b&X-Goog-Expires=9&X-Goog-Signature=SECRET",  # noqa: E501
    "GCS 2": "GoogleAccessId=a%40b&Expires=9&Signature=SECRET",
    "Azure": "sv=2026-01-01&ss=b&srt=sco&sp=rl&se=2027-01-01T00%3A00%3A00Z&st=2026&spr=https&sr=c&sig=SECRET%2F",  # noqa: E501
    "CloudFront": "Expires=9&Policy=SECRET&Signature=SECRET&Key-Pair-Id=K1&Hash-Algorithm=SHA256",
    "OSS": "OSSAccessKeyId=a&Expires=9&Signature=SECRET&security-token=SECRET&x-oss-signature-version=OSS4",  # noqa: E501
    "COS": "q-sign-algorithm=sha1&q-ak=a&q-sign-time=1;2&q-key-time=1;2&q-header-list=&q-url-param-list=&q-signature=SECRET",  # noqa: E501
    "HF": "response-content-disposition=attachment&Policy=SECRET&Signature=SECRET&Key-Pair-Id=K&Expires=9",  # noqa: E501
    "token": "access_token=SECRET",
    "key": "key=SECRET",
    "api": "api_key=SECRET",
    "jwt": "jwt=SECRET&auth=SECRET",
    "password": "password=SECRET",
    "session": "sessionid=SECRET",
    "Akamai": "hdnts=exp=9~acl=/*~hmac=SECRET",
}
"""Queries of URLs that somebody signed, by who did."""


@pytest.mark.parametrize("query", SIGNED.values(), ids=SIGNED)
def test_signed_urls(query):
    """They are shown without their query, are the same with another signature, and count as
    secret.
    """
    url = f"https://host:8443/data/a.jsonl.gz?{query}"
    assert shown_url(url) == url_key(url) == "https://host:8443/data/a.jsonl.gz"
    assert url_key(url.replace("SECRET", "ANOTHER").replace("=9", "=10")) == url_key(url)
    assert has_secrets(url)
    assert has_secrets(url.replace("&", "&amp;"))
    assert has_secrets(url.replace("&", "\\u0026"))
    for text in (
        f"403, url='{url}'",
        f"no ({url}), again",
        f"Max retries with url: {url.removeprefix('https://host:8443')}",
        f"[{url},{url}]",
        f'{{"a": "{url}"}}'.replace("/", "\\/"),
    ):
        assert "SECRET" not in without_secrets(text)
        assert "SECRET" not in without_secrets(text, url)
    assert f"x {url} y".count("SECRET")
    assert quoted(f"x {url} y") == "x https://host:8443/data/a.jsonl.gz y"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://name:pa55@host/a?b=1#c", "https://host/a"),
        ("https://t0ken@host/a", "https://host/a"),
        ("https://name:pa%2F55@host:1/a", "https://host:1/a"),
        ("https://name:pa/55@host/a?b", "https://host/a"),
        ("https://name:p?a#55@host/a", "https://host/a"),
        ("https://name:p@55@host/a@b", "https://host/a@b"),
        ("HTTPS://name:pa55@host/a", "HTTPS://host/a"),
        ("https:/name:pa55@host/a?b", "https:/host/a"),
        ("http://[::1]:80/a?b=::c", "http://[::1]:80/a"),
        ("s3://KEY:se/c+ret@bucket/a", "s3://bucket/a"),
        ("s3://bucket/a?versionId=3", "s3://bucket/a"),
        ("s3://bucket/a#b?.jsonl", "s3://bucket/a#b?.jsonl"),
        ("s3://bucket/a*?.jsonl", "s3://bucket/a*?.jsonl"),
        ("gs://bucket/50%.txt", "gs://bucket/50%.txt"),
        ("ftp://name:pa55@host/a#1.txt", "ftp://host/a#1.txt"),
        (
            "abfs://container@account.dfs.core.windows.net/a",
            "abfs://container@account.dfs.core.windows.net/a",
        ),
        ("github://org:repository@main/a", "github://org:repository@main/a"),
        ("hf://datasets/a/b@main/c", "hf://datasets/a/b@main/c"),
        ("simplecache::https://name:pa55@host/a?b", "simplecache::https://host/a"),
        ("zip://a.txt::https://name:pa55@host/a.zip?b", "zip://a.txt::https://host/a.zip"),
        ("file:///home/me@work/a?b=1#c", "file:///home/me@work/a?b=1#c"),
        ("file:/me@work/a", "file:/me@work/a"),
        ("/home/a?b=1#c", "/home/a?b=1#c"),
        ("a@b:c/d?e=f", "a@b:c/d?e=f"),
        ("C:/a?b=1", "C:/a?b=1"),
        ("", ""),
    ],
)
def test_what_is_shown(url, shown):
    assert shown_url(url) == shown
    assert shown_url(Path("x/y")) == "x/y"
    address = Address(url)
    assert (str(address), f"{address}", repr(address)) == (shown, shown, repr(shown))
    assert pickle.loads(pickle.dumps(address)).full == url


def test_keys_tell_apart_what_is_read():
    same = [
        "https://h/a?id=1&x=2",
        "https://h/a?x=2&id=1",
        "https://h/a?id=1&x=2&token=t#frag",
        "https://u:p@h/a?x=2&id=1",
    ]
    assert len({url_key(url) for url in same}) == 1
    other = [
        "https://h/a",
        "https://h/a?id=1",
        "https://h/a?id=2",
        "https://h/a?ID=1&se=5",
        "https://h/a?file=x/y",
        "https://h/b?id=1",
        "https://h/a?page_token=5",
        "https://h/a?author=me",
        "https://h/a?monkey=1",
        "https://h/a?7",
        "s3://h/a?versionId=1",
        "s3://h/a?versionId=2",
        *same[:1],
    ]
    assert len({url_key(url) for url in other}) == len(other)
    assert not any(map(has_secrets, other))
    assert all(url_key(url).partition("#")[0] == shown_url(url) for url in other)


WORD = st.text("abcXYZ019+/@:?#&=%. é", min_size=4, max_size=12)


@given(
    name=WORD,
    password=WORD,
    value=WORD,
    key=st.sampled_from(["sig", "X-Amz-Signature", "token", "id", "k"]),
)
def test_no_message_holds_what_was_secret(name, password, value, key):
    """Whatever form a library gives it: the URL, its decoded parts, basic authentication."""
    user = f"{quote(name, safe='')}:{quote(password, safe='')}"
    url = f"https://{user}@host/a/b.jsonl?{key}={quote(value, safe='')}"
    assert shown_url(url) == "https://host/a/b.jsonl"
    login = base64.b64encode(f"{name}:{password}".encode()).decode().rstrip("=")
    message = f"GET {url}: Authorization: Basic {login}, query {key}={value}, password={password!r}"
    said = without_secrets(message, url)
    assert password not in said
    assert login not in said
    assert value not in said or (key in ("id", "k") and len(value) < 8)
    assert url not in said


@given(st.text(max_size=60))
def test_other_texts_stay(text):
    assert shown_urls(text) == text or "/" in text
    assert (
        quoted(f"https://host/{quote(text, safe='')}?v=1")
        == f"https://host/{quote(text, safe='')}?v=1"
    )
    once = without_secrets(text)
    assert without_secrets(once) == once


def test_punctuation_and_neighbours_stay():
    assert (
        shown_urls("(see https://h/x?a=1), https://h/y: no.")
        == "(see https://h/x), https://h/y: no."
    )
    assert shown_urls("https://u:p@h/x:17: not JSON") == "https://h/x:17: not JSON"
    assert shown_urls("a,https://u:p@h/x,s3://k:s@b/y") == "a,https://h/x,s3://b/y"
    values = {"a": ["https://u:p@h/x?q", 1, None], "b": {"c": "s3:/k:s@b/y"}, "d": ("no",)}
    assert shown_values(values) == {
        "a": ["https://h/x", 1, None],
        "b": {"c": "s3:/b/y"},
        "d": ["no"],
    }


@pytest.mark.parametrize(
    "kind", [PenstockError, RecordError, StoreError, OutputError, MissingExtraError]
)
def test_every_error_of_ours_is_cleaned(kind):
    error = kind("https://u:pa55@h/x?sig=5ig: refused")
    assert str(error).startswith("https://h/x: refused")
    assert "pa55" not in repr(error) + str(error.args) + str(pickle.loads(pickle.dumps(error)))


def test_causes_of_other_libraries():
    harmless = ValueError("nothing")
    assert plain_cause(harmless, "https://u:p4ss@h/x") is harmless
    inner = RuntimeError("https://h/x?sig=5ig")
    harmless.__cause__ = inner
    assert str(plain_cause(harmless)) == "ValueError: nothing"
    missing = plain_cause(FileNotFoundError("https://h/x?sig=5ig"))
    assert (type(missing), str(missing)) == (FileNotFoundError, "FileNotFoundError: https://h/x")

    class ToldByRepr(Exception):  # noqa: N818
        def __repr__(self):
            return "Authorization: Basic dTpwNHNz"

    assert "dTpwNHNz" not in repr(plain_cause(ToldByRepr("401"), "https://u:p4ss@h/x"))


def test_what_opens():
    assert fsspec_arguments("s3://k:a%2Fb@bucket/x?versionId=1") == (
        "s3://bucket/x?versionId=1", {"key": "k", "secret": "a/b"}
    )  # fmt: skip
    assert fsspec_arguments("https://u:p@h/x?y") == ("https://u:p@h/x?y", {})
    assert split_query("https://u:p@h/x?y=/z#t") == ("https://u:p@h/x", "?y=/z#t")
    assert split_query("/a?b") == ("/a?b", "")


@pytest.mark.parametrize(
    ("location", "found", "full"),
    [
        ("ftp://u:p@host/dir", "ftp:///dir/a", "ftp://u:p@host/dir/a"),
        ("s3://k:s@bucket/dir", "s3://bucket/dir/a", "s3://k:s@bucket/dir/a"),
        ("http://u:p@host/dir/", "http://host/dir/a?x", "http://u:p@host/dir/a?x"),
        ("http://u:p@host/dir/", "http://other/a", "http://other/a"),
        ("http://u:p@host/dir/", "http://u:p@host/a", "http://u:p@host/a"),
        ("memory://x", "memory:///x/a", "memory:///x/a"),
        ("memory:///x", "memory:///x/a", "memory:///x/a"),
        ("simplecache::ftp://u:p@host/a", "ftp:///a", "ftp:///a"),
        ("/a", "/a/b", "/a/b"),
    ],
)
def test_files_below_a_url_keep_what_opens_it(location, found, full):
    assert found_below(location, found) == full


class HostFileSystem(MemoryFileSystem):
    """As those of FTP and SSH: host and user are arguments, and no part of a path."""

    protocol = "hosted"

    def __init__(self, host="", username="", password="", **options):
        super().__init__(**options)
        if password != "pa55":
            raise PermissionError(f"530 login of {username}:{password}@{host} is wrong")

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + fsspec.utils.infer_storage_options(path)["path"].lstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(url):
        options = fsspec.utils.infer_storage_options(url)
        return {
            name: options[name] for name in ("host", "username", "password") if options.get(name)
        }


def test_a_store_whose_paths_have_no_host():
    """Files that it lists are opened with the host and the password again, and named without the
    password.
    """
    fsspec.register_implementation("hosted", HostFileSystem, clobber=True)
    HostFileSystem(host="h", username="me", password="pa55").pipe(
        "/dir/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n'
    )
    url = "hosted://me:pa55@h/dir"
    parts = open_sources(url, part_bytes=20)
    assert {part.file.path for part in parts} == {"hosted://h/dir/a.jsonl"}
    assert list(read_texts(parts)) == ["one", "two"]
    assert "pa55" not in repr(parts)
    with pytest.raises(RecordError, match=r"hosted://h/dir.*PermissionError") as refused:
        open_sources(url.replace("pa55", "wr0ng"))
    assert "wr0ng" not in f"{refused.value} {refused.value.__cause__!r}"
