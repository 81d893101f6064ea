"""Images in the terminal and in pages: named in place of their slots, with a small picture."""

import base64
import io
import json
import re

import pytest
from PIL import Image

import penstock as ps
from makers.image_data import model_folder, prepare, write_records
from makers.processes import call_penstock


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    model = model_folder(folder, "qwen2_vl")
    prepare(write_records(folder / "raw", 8), model, folder / "data")
    return folder


def page_of(path):
    """What a page shows, as JSON values."""
    text = path.read_text()
    return json.loads(
        re.search(r'<script[^>]* id="data">(.*?)</script>', text, re.DOTALL)[1].replace(
            "\\u003c", "<"
        )
    )


def whole_images(part, pieces):
    """(label, picture) of each image, after a check that all its other tokens say nothing."""
    found = []
    for begin, end, number in part["images"]:
        assert all(piece == "" for piece in pieces[begin + 1 : end])
        found.append((pieces[begin], number))
    return found


def pieces_of(page, part):
    tokens, bits, found = base64.b64decode(part["tokens"]), 0, []
    value = 0
    for byte in tokens:
        value |= (byte & 127) << bits
        bits += 7
        if byte < 128:
            found.append(page["vocabulary"]["texts"][value])
            value = bits = 0
    return found


def test_a_page_has_each_picture_once(home, tmp_path):
    data = ps.open_dataset(home / "data")
    ps.inspect(data, html=tmp_path / "page.html", sequence_length=1024)
    page = page_of(tmp_path / "page.html")
    digests = {image.digest for document in data for image in document.images}
    assert len(page["pictures"]) == len(digests) > 3
    shown = Image.open(io.BytesIO(base64.b64decode(page["pictures"][0].partition(",")[2])))
    assert max(shown.size) <= 160
    [documents] = [side["documents"] for side in page["sides"]]
    for document, part in zip(data, documents, strict=True):
        if document.images:
            labels = whole_images(part, pieces_of(page, part))
            assert len(labels) == len(document.images)
            for (label, number), image in zip(labels, document.images, strict=True):
                assert f"{image.width}x{image.height}, {image.slots} slots]" in label
                assert number >= 0
        else:
            assert "images" not in part
    rows = [image for row in page["rows"] for image in whole_images(row, pieces_of(page, row))]
    assert len(rows) >= len(digests)


def test_raw_conversations_with_images(home, tmp_path):
    model = str(home / "model")
    arguments = [
        "inspect",
        str(home / "raw" / "chats.jsonl"),
        "--tokenizer",
        model,
        "--processor",
        model,
    ]
    found = call_penstock(
        *arguments, "--on-missing-terminator", "allow", "--html", str(tmp_path / "page.html")
    )
    assert found.exit_code == 0, found.output
    page = page_of(tmp_path / "page.html")
    prepared = ps.open_dataset(home / "data")
    [documents] = [side["documents"] for side in page["sides"]]
    assert [len(part.get("images", ())) for part in documents] == [
        len(one.images) for one in prepared
    ]
    assert [part["length"] for part in documents] == [len(one.tokens) for one in prepared]


def test_a_missing_image_is_a_refused_conversation(home, tmp_path):
    content = [{"type": "image", "image": "nothing.png"}, {"type": "text", "text": "What?"}]
    record = {
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}]
    }
    (tmp_path / "chats.jsonl").write_text(json.dumps(record) + "\n")
    arguments = ["inspect", str(tmp_path / "chats.jsonl"), "--tokenizer", str(home / "model")]
    found = call_penstock(
        *arguments, "--processor", str(home / "model"), "--on-missing-terminator", "allow"
    )
    assert "nothing.png" in found.output
    assert "cannot be read" in " ".join(found.output.split())


def test_the_page_shows_pictures(browser, home, tmp_path):
    ps.inspect(home / "data", html=tmp_path / "page.html", sequence_length=1024)
    browser.events.clear()
    browser.call("Page.navigate", url=(tmp_path / "page.html").as_uri())
    open_rows = (
        "[...document.querySelectorAll('button,[role=tab]')].find(one => "
        "one.textContent.startsWith('Rows'))"
    )
    wait = "new Promise(done => setTimeout(done, 300))"
    browser.call("Runtime.evaluate", expression=wait, awaitPromise=True)
    browser.run(f"{open_rows}.click()")
    browser.call("Runtime.evaluate", expression=wait, awaitPromise=True)
    shown = "[...document.querySelectorAll('#main .t.image img')]"
    assert browser.run(f"{shown}.length") > 2
    assert browser.run(f"{shown}.every(one => one.naturalWidth > 0)")
    # No slot of an image has an element of its own.
    assert (
        browser.run(
            "[...document.querySelectorAll('#main .t')].filter(one => !one.textContent && "
            "one.dataset.i).length"
        )
        == 0
    )
    assert browser.complaints() == []
