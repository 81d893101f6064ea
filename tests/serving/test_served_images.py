"""Images in messages of clients: data URLs, files only where allowed, and the chat page."""

import base64
import io

import numpy as np
import pytest
from serving_makers import make_model, running
from test_chat_page import answered, say, until, visit, words

from makers.media import picture
from makers.media_files import encoded, forged_rate, turned_images
from makers.media_files import sound as sound_file
from makers.tokenizers import tiny_tokenizer
from penstock.chat import load_template
from penstock.learn.generation.images import ImageReader
from penstock.media import PatchProcessor, load_processor
from penstock.tokenizers.loading import load_tokenizer

CONTROLS = ("<|im_start|>", "<|im_end|>", "<image>")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Makes models with an engine that remembers the images it was given."""
    words = tiny_tokenizer(tmp_path_factory.mktemp("words"), ["some words"], 270, CONTROLS)
    reader = ImageReader(PatchProcessor(words, image_size=32, patch=16))
    template = load_template(reader.processor.template, tokenizer=words)

    def make(folder=None, **options):
        made = make_model(words, images=reader.within(folder), context_length=400, **options)
        object.__setattr__(made, "template", template)
        return made

    return make


def data_url(image, kind="PNG"):
    out = io.BytesIO()
    image.save(out, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def asked(*urls, text="What?"):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def test_images_of_data_urls_reach_the_engine(seeing):
    with running(seeing()) as server:
        urls = [data_url(picture(30, 40)), data_url(picture(40, 30), "JPEG")]
        answer = server.openai().chat.completions.create(model="tiny", messages=asked(*urls), n=2)
        assert answer.choices[1].message.content == "Hello wörld 🙂!"
        for images, (ids, _, _) in zip(server.engine.images, server.engine.asked, strict=True):
            token = server.model.tokenizer.special_tokens["<image>"]
            assert (
                np.flatnonzero(np.array(ids) == token).tolist()
                == np.concatenate(images.slots).tolist()
            )
            assert len(images) == 2
        assert answer.usage.prompt_tokens == len(server.engine.asked[0][0])
        assert server.http.get("/v1/models").json()["data"][0]["reads_images"] is True


def test_files_of_the_allowed_folder(seeing, tmp_path):
    (tmp_path / "in").mkdir()
    picture(30, 40).save(tmp_path / "in" / "a.png")
    picture(30, 40).save(tmp_path / "b.png")
    with running(seeing(str(tmp_path / "in"))) as server:
        assert server.post("/v1/chat/completions", messages=asked("a.png")).status_code == 200
        for url in ("../b.png", str(tmp_path / "b.png"), "https://example.com/a.png"):
            refused = server.post("/v1/chat/completions", messages=asked(url))
            assert refused.status_code == 400
            assert (
                "only images in data URLs and files of the folder"
                in refused.json()["error"]["message"]
            )


@pytest.mark.parametrize(
    ("urls", "says", "code"),
    [
        (["https://example.com/a.png"], "only images in data URLs", "invalid_messages"),
        (["file:///etc/passwd"], "only images in data URLs", "invalid_messages"),
        (["/etc/passwd"], "only images in data URLs", "invalid_messages"),
        (["data:image/png;base64,AAAA"], "not an image of a known format", "invalid_messages"),
        (["data:image/png;base64,???"], "not valid base64", "invalid_messages"),
        (["data:text/plain,hello"], "data URL begins", "invalid_messages"),
        ([data_url(picture(30, 40))] * 17, "17 images, at most 16", "too_many_images"),
        ([data_url(picture(2, 900))], "sides of|ratio|times", "invalid_messages"),
    ],
)
def test_other_images_are_refused(seeing, urls, says, code):
    with running(seeing()) as server:
        refused = server.post("/v1/chat/completions", messages=asked(*urls))
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["code"] == code
        assert any(one in error["message"] for one in says.split("|")), error
        assert "/etc" not in error["message"]
        assert server.post("/v1/chat/completions", messages=asked(text="Hi")).status_code == 200


def test_parts_and_bodies_are_checked(seeing, tokenizer):
    url = data_url(picture(400, 400))
    assert len(url) > 200_000
    with running(seeing(), body_bytes=1000, image_bytes=len(url) * 3 // 2) as server:
        assert server.post("/v1/chat/completions", messages=asked(url)).status_code == 200
        assert server.post("/v1/chat/completions", messages=asked(url, url)).status_code == 413
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
        refused = server.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}])
        assert "detail" in refused.json()["error"]["param"]
        refused = server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": [{"type": "video_url"}]}]
        )
        assert refused.status_code == 400
    with running(make_model(tokenizer)) as server:
        small = asked(data_url(picture(3, 3)))
        assert (
            server.post("/v1/chat/completions", messages=small).json()["error"]["code"]
            == "images_not_supported"
        )


def test_the_chat_page_sends_images(browser, seeing):
    url = data_url(picture(60, 80))
    with running(seeing()) as server:
        page = visit(browser, server.url)
        assert not page.run("document.querySelector('#attach').hidden")
        page.run(
            f"(async () => {{ const bytes = Uint8Array.from(atob('{url.split(',')[1]}'), c => "
            "c.charCodeAt(0)); await attach([new File([bytes], 'a.png', {type: "
            "'image/png'})]); })()"
        )
        until(page, "document.querySelectorAll('#attached img').length === 1")
        say(page, "What is it?")
        answered(page, 1)
        assert words(page) == ["What is it?", "Hello wörld 🙂!"]
        assert page.run("document.querySelectorAll('.message.user img').length") == 1
        assert page.run("document.querySelectorAll('#attached img').length") == 0
        assert [len(images) for images in server.engine.images] == [1]
        say(page, "And now?")
        answered(page, 2)
        assert [len(images) for images in server.engine.images] == [1, 1]
        assert page.complaints() == []
    with running(make_model(server.model.tokenizer)) as server:
        page = visit(browser, server.url)
        assert page.run("document.querySelector('#attach').hidden")


@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_sounds_of_messages(tokenizer, tmp_path):
    from makers.audio import as_wave, processor, samples

    processor().save_pretrained(tmp_path)
    reader = ImageReader(load_processor(tmp_path))
    words = load_tokenizer(tmp_path)
    made = make_model(words, images=reader, context_length=400)
    object.__setattr__(made, "template", load_template(tmp_path, tokenizer=words))
    sound = base64.b64encode(as_wave(samples(0.5))).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "text", "text": "What?"},
    ]
    with running(made) as server:
        assert server.http.get("/v1/models").json()["data"][0]["reads_images"] is False
        assert (
            server.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": parts}]
            ).status_code
            == 200
        )
        assert [len(images) for images in server.engine.images] == [1]
        refused = server.post("/v1/chat/completions", messages=asked(data_url(picture(9, 9))))
        assert "only audio is supported here" in refused.json()["error"]["message"]
        for bad, says in (
            (forged_rate("WAV", 0), "0 samples a second"),
            (as_wave(samples(0.5))[:600], "the sound is damaged"),
            (as_wave(samples(3.0)), "the processor reads at most 2.0 s"),
            (as_wave(samples(0.5))[:44] + b"x", "the sound is damaged"),
            (
                sound_file("WAV FLOAT", np.full((100, 1), np.nan, np.float32)),
                "sample 0 of channel 0 is nan",
            ),
        ):
            parts[0] = {
                "type": "input_audio",
                "input_audio": {"data": base64.b64encode(bad).decode(), "format": "wav"},
            }
            refused = server.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": parts}]
            )
            assert refused.status_code == 400, refused.text
            assert says in refused.json()["error"]["message"]


def test_damaged_images_are_refused_and_the_server_goes_on(seeing):
    whole = encoded(picture(30, 40), "PNG")
    with running(seeing()) as server:
        for bad in (
            whole[:-80],
            whole[:40],
            turned_images(6)["WEBP exif"][:-50],
            b"\xff\xd8\xff\xe0" + bytes(50),
        ):
            url = f"data:image/png;base64,{base64.b64encode(bad).decode()}"
            refused = server.post("/v1/chat/completions", messages=asked(url))
            assert refused.status_code == 400, refused.text
            assert "image" in refused.json()["error"]["message"]
        assert (
            server.post(
                "/v1/chat/completions", messages=asked(data_url(picture(30, 40)))
            ).status_code
            == 200
        )
