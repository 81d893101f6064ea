"""Videos become frames, which are images in the order of the conversation."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import penstock as ps
from makers.image_data import model_folder, prepare
from makers.media import picture
from penstock.core.errors import ConfigError, RecordError
from penstock.learn.generation.images import ImageReader
from penstock.learn.generation.session import fit_chat
from penstock.media.images import ImageSettings
from penstock.media.processor import load_processor
from penstock.media.videos import read_frames, spread

COUNT = 7


def frames_of(count=COUNT):
    """Frames of one colour each, so that a lossy video still shows which is which."""
    return [
        Image.new("RGB", (96, 64), (30 * number, 255 - 30 * number, 128)) for number in range(count)
    ]


def animated(kind, count=COUNT):
    first, *rest = frames_of(count)
    out = io.BytesIO()
    first.save(
        out,
        kind,
        save_all=True,
        append_images=rest,
        duration=40,
        **({"lossless": True} if kind == "WEBP" else {}),
    )
    return out.getvalue()


def film(count=COUNT):
    av = pytest.importorskip("av")
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for image in frames_of(count):
            file.mux(stream.encode(av.VideoFrame.from_image(image)))
        file.mux(stream.encode())
    return out.getvalue()


def colours(frames):
    return [int(np.asarray(Image.open(io.BytesIO(data)))[..., 0].mean()) for data in frames]


@given(st.integers(1, 500), st.integers(1, 64))
def test_frames_are_evenly_spread(total, count):
    found = spread(total, count)
    assert len(found) == min(total, count)
    assert all(0 <= one < total for one in found)
    gaps = np.diff([-1 - found[0], *found])[1:]
    assert len(gaps) == 0 or gaps.min() >= 1
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MP4"])
def test_frames_of_all_kinds(kind):
    data = film() if kind == "MP4" else animated(kind)
    due = [30 * number for number in range(COUNT)]
    np.testing.assert_allclose(colours(read_frames(data, 100)), due, atol=6)
    np.testing.assert_allclose(
        colours(read_frames(data, 3)), [due[number] for number in spread(COUNT, 3)], atol=6
    )


def test_what_is_no_video_is_refused():
    pytest.importorskip("av")
    with pytest.raises(RecordError, match="not a video that can be read"):
        read_frames(b"not a video", 3)
    with pytest.raises(RecordError, match="damaged"):
        read_frames(animated("GIF")[:200], 3)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    model = model_folder(folder, "qwen2_vl")
    (folder / "a.gif").write_bytes(animated("GIF"))
    picture(84, 112).save(folder / "b.png")
    for number, image in enumerate(frames_of(5)):
        image.save(folder / f"f{number}.png")
    return folder, model


def said(content, **fields):
    return {
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "A thing."},
        ],
        **fields,
    }


def write(folder, *records):
    (folder / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder / "chats.jsonl"


def test_videos_wherever_records_hold_them(home, tmp_path):
    folder, model = home
    names = [f"f{number}.png" for number in range(5)]
    parts = [
        {"type": "image", "image": "b.png"},
        {"type": "video", "video": "a.gif"},
        {"type": "text", "text": "What?"},
    ]
    records = [
        said(parts),
        said(
            [
                {"type": "video_url", "video_url": {"url": "a.gif"}},
                {"type": "text", "text": "What?"},
            ]
        ),
        said([{"type": "video", "video": names}, {"type": "text", "text": "What?"}]),
        said("<video>\nAnd <image>, what?", videos=["a.gif"], images=["b.png"]),
        said("<image>\nWhat?", video="a.gif"),
        said("<video>What?", videos=[names]),
        said("No video."),
    ]
    data = prepare(
        write(folder, *records), model, tmp_path / "data", video_frames=4, verify_all=True
    )
    assert [len(one.images) for one in data] == [5, 4, 4, 5, 4, 4, 0]
    whole = [
        read_frames(animated("GIF"), 4),
        [(folder / names[number]).read_bytes() for number in spread(5, 4)],
    ]
    assert [one.read() for one in data[1].images] == whole[0]
    assert (
        [one.read() for one in data[2].images] == [one.read() for one in data[5].images] == whole[1]
    )
    assert [image.name.rpartition("/")[2] for image in data[0].images][:2] == [
        "b.png",
        "a.gif frame 0",
    ]
    assert data[3].images[-1].name.endswith("b.png")
    once = ps.Source(tmp_path / "data", max_epochs=1)
    step = next(iter(ps.Loader(once, sequence_length=2048, rows_per_step=1)))
    assert len(step[0].media) == 26


def test_videos_are_refused_unless_frames_are_asked_for(home, tmp_path):
    folder, model = home
    for record in (
        said([{"type": "video", "video": "a.gif"}]),
        said("<video>What?", videos=["a.gif"]),
    ):
        with pytest.raises(RecordError, match=r"videos as frames \(video_frames\)"):
            prepare(write(folder, record), model, tmp_path / "data")
    with pytest.raises(RecordError, match='a part of type "audio"'):
        prepare(
            write(folder, said([{"type": "audio", "audio": "a.mp3"}])),
            model,
            tmp_path / "data",
            video_frames=4,
        )
    with pytest.raises(RecordError, match="cannot be read"):
        prepare(
            write(folder, said([{"type": "video", "video": "none.mp4"}])),
            model,
            tmp_path / "data",
            video_frames=4,
        )
    with pytest.raises(ConfigError, match="video_frames must be 0 or more"):
        ImageSettings(video_frames=-1)


def test_prompts_with_videos(home):
    folder, model = home
    tokenizer = ps.load_tokenizer(model)
    template = ps.chat.load_template(model, tokenizer=tokenizer)
    reader = ImageReader(load_processor(model), ImageSettings(video_frames=3), folder=folder)
    for video in ("a.gif", [f"f{number}.png" for number in range(5)]):
        message = {
            "role": "user",
            "content": [{"type": "video", "video": video}, {"type": "text", "text": "What?"}],
        }
        prompt = fit_chat([message], template, tokenizer, room=900, images=reader)
        assert len(prompt.images) == 3
        with pytest.raises(RecordError, match="only images in data URLs"):
            fit_chat([message], template, tokenizer, room=900, images=reader.within(None))
