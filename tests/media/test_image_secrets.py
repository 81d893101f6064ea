"""URLs of images with a password or a signature: they serve to read, and are stored nowhere, also
not as references.
"""

import json

import pytest

import penstock as ps
from makers.image_data import model_folder
from makers.media import picture
from makers.secret_server import PASSWORD, SIGNATURE, found_secrets, leaks, printed, secret_server
from penstock.core.errors import PenstockError, RecordError
from penstock.data.prepare.chat_settings import ChatSettings
from penstock.media.finding import find_image
from penstock.media.images import ImageSettings
from penstock.media.loading import load_image
from penstock.use.inspection.conversations import sample_records, show_conversations

pytest.importorskip("aiohttp")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    (folder / "served").mkdir()
    for number in range(3):
        picture(84, 112, seed=number).save(folder / "served" / f"{number}.png")
    (folder / "served" / "0.png.7").write_bytes((folder / "served" / "1.png").read_bytes())
    return folder, model_folder(folder, "qwen2_vl")


@pytest.fixture
def server(home, monkeypatch):
    with secret_server(home[0] / "served", monkeypatch) as running:
        yield running


def chats(*urls):
    return [
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": url}, {"type": "text", "text": "What?"}],
                },
                {"role": "assistant", "content": "It."},
            ]
        }
        for url in urls
    ]


def prepare(source, home, output, **options):
    options = {
        "template": "auto",
        "on_missing_terminator": "allow",
        "progress": False,
        "processes": 1,
        **options,
    }
    return ps.prepare(source, tokenizer=home[1], output=output, processor=home[1], **options).report


def test_images_are_stored_with_names_that_hold_no_secret(home, server, tmp_path):
    urls = [server.private("0.png"), server.signed("1.png"), server.open("2.png?w=200")]
    prepare(chats(*urls), home, tmp_path / "out")
    dataset = ps.open_dataset(tmp_path / "out")
    names = [image.name for number in range(3) for image in dataset[number].images]
    assert [name.partition(f":{server.server_port}")[2] for name in names] == [
        "/private/0.png", "/signed/1.png", "/open/2.png"
    ]  # fmt: skip
    assert dataset[1].images[0].read() == (server.folder / "1.png").read_bytes()
    assert leaks(tmp_path) == {}


@pytest.mark.parametrize("refused", ["private", "signed"])
def test_no_reference_to_an_image_that_needs_a_secret(home, server, tmp_path, refused):
    url = getattr(server, refused)("0.png")
    due = (
        rf"/{refused}/0.png: its URL has user info or a signature, .*image_storage copy "
        rf"\(--image-storage copy\)"
    )
    with pytest.raises(RecordError, match=due) as stopped:
        prepare(chats(url), home, tmp_path / "out", image_storage="reference")
    report = prepare(
        chats(url, server.open("1.png")),
        home,
        tmp_path / "two",
        image_storage="reference",
        on_error="skip",
    )
    assert (report.documents, report.rejects) == (1, 1)
    assert (leaks(tmp_path), found_secrets(printed(stopped.value))) == ({}, [])


def test_references_are_stored_without_a_query_that_changes_nothing(home, server, tmp_path):
    prepare(
        chats(server.open("1.png?w=200#top")), home, tmp_path / "out", image_storage="reference"
    )
    (image,) = ps.open_dataset(tmp_path / "out")[0].images
    assert (image.name, image.read()) == (
        server.open("1.png"),
        (server.folder / "1.png").read_bytes(),
    )
    kept = b"".join(path.read_bytes() for path in (tmp_path / "out").glob("*.assets"))
    assert json.loads(kept[kept.index(b"{") : kept.index(b"}") + 1]) == {
        "path": server.open("1.png")
    }
    due = (
        r"/open/0.png: URLs are stored without their query, and without it this one does not lead "
        r".*storage copy"
    )
    with pytest.raises(RecordError, match=due):
        prepare(chats(server.open("0.png?id=7")), home, tmp_path / "no", image_storage="reference")


def test_relative_paths_begin_at_the_full_url_of_the_records(home, server, tmp_path):
    (server.folder / "chats.jsonl").write_text(json.dumps(chats("0.png")[0]) + "\n")
    prepare(server.private("chats.jsonl"), home, tmp_path / "out")
    (image,) = ps.open_dataset(tmp_path / "out")[0].images
    assert image.name.endswith(f"127.0.0.1:{server.server_port}/private/0.png")
    sample = sample_records(server.private("chats.jsonl"), 5)
    shown = show_conversations(sample, ps.load_tokenizer(home[1]), ChatSettings(processor=home[1]))
    assert not [
        note for document in shown.flat for note in document.notes if "cannot be read" in str(note)
    ]
    assert (found_secrets(repr(sample) + repr(shown.flat)), leaks(tmp_path)) == ([], {})


@pytest.mark.parametrize("kind", ["private", "signed"])
def test_a_folder_of_images_behind_a_secret(home, server, tmp_path, kind, capsys):
    """It is a setting, and settings are stored."""
    options = {"image_folder": getattr(server, kind)(""), "progress": True, "verbose": True}
    prepare(chats("0.png", "sub/../1.png"), home, tmp_path / "out", **options)
    dataset = ps.open_dataset(tmp_path / "out")
    assert dataset[0].images[0].name == f"http://127.0.0.1:{server.server_port}/{kind}/0.png"
    again = prepare(chats("0.png", "sub/../1.png"), home, tmp_path / "out", **options)
    assert (
        dataset.media.settings["image_folder"] == f"http://127.0.0.1:{server.server_port}/{kind}/"
    )
    shown = "".join(capsys.readouterr()) + str(again) + repr(dataset.media)
    assert (leaks(tmp_path), found_secrets(shown)) == ({}, [])


def test_records_that_are_refused_are_quoted_without_secrets(home, server, tmp_path):
    """In rejects, in messages, and where raw conversations are shown; wherever the quotation is
    cut.
    """
    url = server.signed("absent.png")
    records = [
        *chats(url, server.private("absent.png")),
        {"messages": [{"role": "user", "image": url}]},
    ]
    records += [
        {"pad": "x" * size, "url": f"https://reader:{PASSWORD}@host/"}
        for size in range(100, 160, 7)
    ]
    lines = [json.dumps(record) for record in records]
    lines += [*(line.replace("/", "\\/") for line in lines), lines[0][:-3], json.dumps([url])]
    (tmp_path / "chats.jsonl").write_text(
        "\n".join([*lines, json.dumps(chats(server.open("0.png"))[0])])
    )
    report = prepare(tmp_path / "chats.jsonl", home, tmp_path / "out", on_error="skip")
    assert (report.documents, report.rejects) == (1, len(lines))
    shown = show_conversations(
        sample_records(str(tmp_path / "chats.jsonl"), 99),
        ps.load_tokenizer(home[1]),
        ChatSettings(processor=home[1]),
    )
    pages = "".join("".join(document.pieces) + repr(document.notes) for document in shown.flat)
    assert (found_secrets(pages + repr(report) + str(report)), leaks(tmp_path / "out")) == ([], {})


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_an_image_that_a_server_refuses(server, status):
    server.status["0.png"] = status
    for url in (server.private("0.png"), server.signed("0.png")):
        with pytest.raises(RecordError, match=r"/0.png: the image cannot be read: ") as refused:
            load_image(url, "", ImageSettings())
        assert found_secrets(printed(refused.value) + repr(refused.value)) == []


def test_what_is_shown_of_an_image(server):
    found = load_image({"url": server.signed("0.png")}, "", ImageSettings())
    assert found_secrets(found.origin + repr(found) + found.reference().decode()) == []
    assert found.read() == (server.folder / "0.png").read_bytes()
    for value in (
        f"\0{server.signed('0.png')}",
        [server.signed("0.png")],
        {"a": server.private("x")},
        b"no picture",
        f"data:{SIGNATURE}"[:9],
    ):
        with pytest.raises(PenstockError, match=r"image|picture") as refused:
            load_image(value, server.private(""), ImageSettings())
        assert found_secrets(printed(refused.value)) == [], value
    assert find_image("b.png", "https://u:p@host/dir")[0] == "https://u:p@host/dir/b.png"
