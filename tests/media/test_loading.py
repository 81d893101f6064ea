"""Images of records: every form in which a record may hold one leads to the same bytes."""

import base64
import io

import pytest
from PIL import Image

from penstock.core.errors import RecordError
from penstock.media.finding import find_image
from penstock.media.images import ImageSettings
from penstock.media.loading import digest_of, load_image, read_reference


@pytest.fixture
def data():
    out = io.BytesIO()
    Image.new("RGB", (6, 4), (1, 2, 3)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def file(tmp_path, data):
    (tmp_path / "a b.png").write_bytes(data)
    return tmp_path / "a b.png"


def forms(data, file):
    text = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{text}"
    yield from ("a b.png", str(file), file, f"file://{file}", url, data, bytearray(data))
    yield {"bytes": data, "path": None}
    yield {"bytes": data, "path": "somewhere.png"}
    yield {"bytes": None, "path": str(file)}
    yield {"image": "a b.png"}
    yield {"path": "a b.png", "url": None}
    yield {"base64": text}
    yield {"image": {"bytes": text, "path": None}}
    yield {"image_url": {"url": url, "detail": "low"}}
    yield {"image_url": url}
    yield {"source": {"type": "base64", "media_type": "image/png", "data": text}}


def test_all_forms_lead_to_the_same_image(data, file):
    for form in forms(data, file):
        found = load_image(form, str(file.parent), ImageSettings())
        assert (found.size, found.digest, found.read()) == ((4, 6), digest_of(data), data), form


def test_a_picture_of_pillow_keeps_its_pixels_and_orientation(data):
    picture = Image.new("L", (5, 3), 77)
    picture.getexif()[0x0112] = 6
    found = load_image(picture, "", ImageSettings())
    assert found.size == (5, 3)
    assert found.is_embedded


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (7, "expected a path"),
        ({}, "found none"),
        ({"text": "a"}, "found none"),
        ({"path": "a.png", "url": "http://b"}, "several"),
        ({"image": "a.png", "base64": "QQ=="}, "several"),
        ({"base64": "%%%"}, "not valid base64"),
        ("data:image/png,abc", "data URL"),
        ("missing.png", "No such file"),
        ("", "has the path"),
        ("a\0b", "has the path"),
    ],
)
def test_what_leads_to_no_image_says_why(form, message, tmp_path):
    with pytest.raises(RecordError, match=message):
        load_image(form, str(tmp_path), ImageSettings())


def test_relative_paths_begin_at_the_folder(tmp_path):
    assert find_image("a/b.png", "s3://bucket/data")[0] == "s3://bucket/data/a/b.png"
    assert find_image("https://host/b.png", str(tmp_path))[0] == "https://host/b.png"
    assert find_image("/abs.png", str(tmp_path))[0] == "/abs.png"


def test_a_file_that_changes_meanwhile_is_an_error(file):
    found = load_image(str(file), "", ImageSettings())
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(RecordError, match="changed while it was prepared"):
        found.read()


def test_a_reference_leads_to_the_image(file, data):
    found = load_image(str(file), "", ImageSettings())
    assert read_reference(found.reference()) == data
