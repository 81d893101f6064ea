"""Trajectories with images: each image stands in every prompt where the chat encoder puts it, and a
template that moves one is refused.
"""

import base64
import io
import json
import warnings

import numpy as np
import pytest
from chat_makers import TOKENS, make_tokenizer, markers_of
from PIL import Image

from makers import audio
from makers.image_trajectories import (
    CHATML,
    CONTROLS,
    CONVERSATION,
    HISTORIES,
    PARTS,
    REPLY,
    A,
    B,
    C,
    D,
    family_of,
    places,
    said,
)
from makers.media import FAMILIES
from makers.tokenizers import tiny_tokenizer
from penstock.chat import (
    ChatEncoder,
    MaskSettings,
    Template,
    Trajectory,
    TrajectoryReader,
    read_conversation,
)
from penstock.chat.records.images import place_images
from penstock.core.errors import ConfigError, ConversationError
from penstock.integrations.huggingface.vision_examples import own_tokenizer
from penstock.media.images import ImageSettings
from penstock.media.loading import load_image
from penstock.media.patches import PatchProcessor
from penstock.media.processor import HuggingFaceProcessor


@pytest.fixture(scope="module")
def patches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patches") / "tokenizer"
    tokenizer = tiny_tokenizer(folder, ["What is it? Yes. And this or that"] * 9, 320, CONTROLS)
    return tokenizer, PatchProcessor(tokenizer, image_size=32, patch=16)


def twin(tokenizer, template, made, messages):
    """The conversation as the chat encoder encodes it."""
    encoder = ChatEncoder(
        tokenizer, template, MaskSettings(on_missing_terminator="allow"), processor=made
    )
    placed = place_images(
        read_conversation({"messages": messages}),
        lambda value: load_image(value, "", ImageSettings()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers' own code
        return encoder.encode(placed)[0]


def walk(tokenizer, template, made, history, prompts=CONVERSATION, *, exact=True):
    """A trajectory whose replies are those of the twin, compared with it at each prompt."""
    trajectory = Trajectory(tokenizer, template, history=history, processor=made)
    names = set(tokenizer.special_tokens.values())
    messages = []
    for new in prompts:
        ids = trajectory.prompt(new)
        messages += [*new, REPLY]
        whole = twin(tokenizer, template, made, messages)
        if exact:
            assert whole.tokens[: len(ids)].tolist() == [*ids]
            assert places(trajectory.images) == places(whole.images)
        sampled = whole.tokens[len(ids) :].tolist() if exact else tokenizer.encode("Yes.").tolist()
        ends = [place for place, one in enumerate(sampled) if one in names]
        trajectory.reply(sampled[: ends[0] + 1] if ends else sampled, message=REPLY)
    return trajectory


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_the_chat_encoder(family, history):
    trajectory = walk(*family_of(family), history)
    certificate = trajectory.certificate
    assert certificate.ok, certificate
    assert certificate.images == 4
    assert "4 images at their places" in str(certificate)
    [path] = trajectory.paths()
    assert places(path.images) == places(trajectory.images)


@pytest.mark.parametrize("history", HISTORIES)
def test_our_own_processor_and_what_the_engine_gets(patches, history):
    tokenizer, made = patches
    trajectory = walk(tokenizer, Template(source=CHATML, name="chatml"), made, history)
    trajectory.prompt([said(C, C, A)])
    images = trajectory.prompt_images()
    assert len(images) == 7
    assert [slots.tolist() for slots in images.slots] == [
        [*range(place.begin, place.end)] for _, place in trajectory.images
    ]
    np.testing.assert_array_equal(
        images.arrays[4]["pixel_values"], images.arrays[5]["pixel_values"]
    )
    assert images.digests[4] == images.digests[5] != images.digests[6] == images.digests[0]
    # Those behind the last reply belong to no path.
    assert len(trajectory.paths()[0].images) == 4


def test_without_images_there_are_none(patches):
    tokenizer, made = patches
    trajectory = walk(
        tokenizer,
        Template(source=CHATML, name="chatml"),
        made,
        "sampled",
        [[said("What?")], [said("And?")]],
    )
    assert trajectory.images == ()
    assert trajectory.prompt_images() is None
    assert "images" not in str(trajectory.certificate)


def test_a_branch_shares_the_images_of_its_beginning(patches):
    tokenizer, made = patches
    forgets = Template(
        source=CHATML.replace(
            "{% if m.content is string %}",
            "{% if m.role == 'assistant' and loop.index0 < messages | length - 2 %}It was said."
            "{% elif m.content is string %}",
        ),
        name="forgets",
    )
    trajectory = walk(tokenizer, forgets, made, "template", exact=False)
    assert [step.kind for step in trajectory.steps] == ["first", "extends", "branch", "branch"]
    assert trajectory.certificate.ok
    assert trajectory.certificate.images == 4
    first, *others = trajectory.paths()
    assert [one.digest for one, _ in first.images] == [
        one.digest for one, _ in others[1].images[:3]
    ]
    for path in others:
        assert places(path.images)[0] == places(first.images)[0]
        for _, place in path.images:
            assert (path.ids[place.begin : place.end] == made.slot_id).all()


def test_the_certificate_finds_another_image(patches):
    trajectory = walk(*patches_as_parts(patches), "sampled")
    [path] = trajectory.paths()
    first, *others = path.images
    for changed in (others, [(others[0][0], first[1]), *others]):
        found = trajectory._proof.certificate([path._replace(images=tuple(changed))])
        assert found.problems[0] == "reply 0: the images before it are not those sent"


def patches_as_parts(patches):
    tokenizer, made = patches
    return tokenizer, Template(source=CHATML, name="chatml"), made


# -- sounds and videos


@pytest.mark.filterwarnings("ignore:At least one mel filter")
@pytest.mark.parametrize("history", HISTORIES)
def test_sounds(history, tmp_path):
    inner = audio.processor()
    tokenizer, made = own_tokenizer(inner.tokenizer), HuggingFaceProcessor(inner, "audio")
    template = Template(source=audio.TEMPLATE, name="audio")
    trajectory = Trajectory(tokenizer, template, history=history, processor=made)
    sounds = [audio.as_wave(audio.samples(seconds)) for seconds in (0.5, 1.3)]
    (tmp_path / "second.wav").write_bytes(sounds[1])
    encoded = base64.b64encode(sounds[0]).decode()
    given = [
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
        {"type": "audio", "audio": str(tmp_path / "second.wav")},
    ]
    for part in given:
        trajectory.prompt([{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
        trajectory.reply(tokenizer.encode("Yes.").tolist(), message=REPLY)
    assert trajectory.certificate.ok
    slots = [made.layout((1, len(audio.samples(seconds)))).slots for seconds in (0.5, 1.3)]
    assert [place.layout.slots for _, place in trajectory.images] == slots
    assert len(trajectory.prompt_images()) == 2
    reader = TrajectoryReader(tokenizer=tokenizer, template=template, processor=made, variables={})
    [path] = reader.read(json.loads(json.dumps(trajectory.record()))).paths
    assert places(path.images) == places(trajectory.images)
    with pytest.raises(ConversationError, match="only audio is supported here"):
        trajectory.prompt([said(A)])


def test_videos_are_their_frames(patches):
    frames = [Image.new("RGB", (96, 64), (30 * number, 9, 128)) for number in range(7)]
    out = io.BytesIO()
    frames[0].save(out, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    tokenizer, made = patches
    film = {"role": "user", "content": [{"type": "video", "video": out.getvalue()}]}
    plain = Trajectory(tokenizer, CHATML, processor=made)
    with pytest.raises(ConversationError, match=r"videos as frames \(video_frames\)"):
        plain.prompt([film])
    trajectory = Trajectory(
        tokenizer, CHATML, processor=made, image_settings=ImageSettings(video_frames=3)
    )
    trajectory.prompt([film, said(A)])
    shown = [Image.open(io.BytesIO(image.read())) for image, _ in trajectory.images]
    assert len(shown) == 4
    reds = [image.getpixel((0, 0))[0] for image in shown[:3]]
    assert reds == sorted(set(reds))


# -- templates of real models

HOLDERS = (
    *("<|image_pad|>", "<start_of_image>", "<image_soft_token>"),
    *("<|image|>", "[IMG]", "<image>"),
)


@pytest.mark.real_data
def test_templates_of_real_models(real_data, tmp_path):
    """All that have images, apart from what they write of thoughts before the reply."""
    tried = 0
    for path in sorted(real_data.joinpath("chat_templates").glob("*/*.jinja")):
        source = path.read_text(encoding="utf-8")
        holder = next((one for one in HOLDERS if one in source), None)
        if holder is None:
            continue
        tokenizer = make_tokenizer(tmp_path, sorted({*markers_of(source), holder}))
        made = PatchProcessor(tokenizer, image_size=32, patch=16, image_token=holder)
        template = Template(source=source, name=path.stem, variables=TOKENS)
        for history in HISTORIES:
            trajectory = walk(tokenizer, template, made, history, exact=False)
            assert trajectory.certificate.ok, path
            messages = [message for new in CONVERSATION for message in (*new, REPLY)]
            whole = twin(tokenizer, template, made, messages)
            assert [one.digest for one, _ in trajectory.images] == [
                one.digest for one, _ in whole.images
            ]
            slots = np.array(trajectory.ids) == made.slot_id
            assert slots.sum() == 4 * made.slots
            assert all(slots[place.begin : place.end].all() for _, place in trajectory.images)
        tried += 1
    assert tried >= 13


# -- templates that move images

MOVES = {
    "another order": CHATML.replace("in m.content %}", "in m.content | reverse %}"),
    "missing": CHATML.replace("p.type == 'image' %}", "p.type == 'image' and not loop.first %}"),
    "twice": CHATML.replace("%}<image>{%", "%}<image><image>{%"),
}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(
    ("kind", "said_of_it"),
    [
        ("another order", "part 1 of message 0 where that of part 0 of message 0 belongs"),
        ("missing", "writes 1 images for the 2 of message 0"),
        ("twice", "writes 4 images for the 2 of message 0"),
    ],
)
def test_a_moved_image_is_refused(patches, kind, said_of_it, history):
    tokenizer, made = patches
    template = Template(source=MOVES[kind], name="moves")
    trajectory = Trajectory(tokenizer, template, history=history, processor=made)
    with pytest.raises(ConversationError, match="chat template moves: .*" + said_of_it):
        trajectory.prompt([said(A, B)])
    assert trajectory.messages == []


def after_a_reply(patches, source, new, history="template"):
    """The second prompt, with images A and B in the first."""
    tokenizer, made = patches
    trajectory = Trajectory(
        tokenizer, Template(source=source, name="moves"), history=history, processor=made
    )
    trajectory.prompt([said(A, "x"), said(B, "y")])
    ids = tokenizer.encode("Yes.<|im_end|>", allow_control=True).tolist()
    trajectory.reply(ids)
    return trajectory, trajectory.prompt(new)


def test_another_order_of_messages_is_refused(patches):
    swapped = CHATML.replace(
        "in messages %}",
        "in (messages if messages | length < 4 else [messages[1], messages[0]] + messages[2:]) %}",
    )
    with pytest.raises(ConversationError, match="of message 1 where that of part 0 of message 0"):
        after_a_reply(patches, swapped, [said(C)])
    # What the model saw stays.
    trajectory, _ = after_a_reply(patches, swapped, [said(C)], "sampled")
    assert trajectory.steps[-1].why.startswith("the template would rewrite it")
    assert len(trajectory.images) == 3


def test_images_that_the_template_forgets_stay_only_in_what_was_sampled(patches):
    forgets = CHATML.replace(
        "p.type == 'image' %}<image>",
        "p.type == 'image' %}{% if loop.length and m == messages[-1] or messages | length < 4 %}"
        "<image>{% endif %}",
    )
    with pytest.raises(ConversationError, match="writes 0 images for the 1 of message 0"):
        after_a_reply(patches, forgets, [said(C)])
    trajectory, ids = after_a_reply(patches, forgets, [said(C)], "sampled")
    assert [*ids].count(patches[1].slot_id) == 3 * patches[1].slots
    assert trajectory.certificate.ok


@pytest.mark.parametrize("history", ["sampled", "tool_cycle"])
def test_an_image_again_behind_the_reply_is_refused(patches, history):
    again = CHATML.replace(
        "<|im_end|>\n{% endfor %}",
        "{% if loop.last and loop.index0 > 1 %}{% for p in messages[0].content %}"
        "{% if p.type == 'image' %}<image>{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}",
    )
    tool = [said(C, role="tool")]
    with pytest.raises(
        ConversationError,
        match="moves: writes an image of message 0 again behind message 2, a sampled reply",
    ):
        after_a_reply(patches, again, tool, history)


@pytest.mark.parametrize("history", HISTORIES)
def test_a_new_image_before_the_reply_is_refused(patches, history):
    first = (
        "{% set late = messages | length > 3 %}{% if late %}{% for p in messages[-1].content %}"
        "{% if p.type == 'image' %}<image>{% endif %}{% endfor %}{% endif %}"
    ) + CHATML.replace(
        "p.type == 'image' %}<image>",
        "p.type == 'image' %}{% if not (late and m == messages[-1]) %}<image>{% endif %}",
    )
    said_of_it = "writes 0 images for the 1 of message 3 behind message 2, a sampled reply"
    if history != "sampled":
        said_of_it = "an image of part 0 of message 3 where that of part 0 of message 0 belongs"
    with pytest.raises(ConversationError, match=said_of_it):
        after_a_reply(patches, first, [said(C, "z")], history)


def test_a_template_that_counts_is_followed_by_the_turns_of_messages(patches):
    counts = CHATML.replace(
        PARTS,
        "{{ '<image>' * (m.content | selectattr('type', 'equalto', 'image') | list | length) }}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}",
    )
    trajectory, _ = after_a_reply(patches, counts, [said("z", C, D)])
    assert len(trajectory.images) == 4
    assert trajectory.certificate.ok


# -- what is refused


def test_without_a_processor_images_are_refused(patches):
    trajectory = Trajectory(patches[0], CHATML)
    with pytest.raises(ConversationError, match=r"message 0.*need the processor of a model"):
        trajectory.prompt([said(A)])


def test_settings_of_images_need_a_processor(patches):
    with pytest.raises(ConfigError, match="image_settings are for a processor"):
        Trajectory(patches[0], CHATML, image_settings=ImageSettings())


def test_replies_have_no_images(patches):
    trajectory = Trajectory(patches[0], CHATML, processor=patches[1])
    trajectory.prompt([said(A)])
    with pytest.raises(ConversationError, match="images need the processor"):
        trajectory.reply([1], message=said(B, role="assistant"))


def test_a_sampled_token_of_images_is_refused(patches):
    tokenizer, made = patches
    trajectory = Trajectory(tokenizer, CHATML, processor=made)
    trajectory.prompt([said(A)])
    with pytest.raises(ConversationError, match=r"reply 0: token 1 is \d+, where models read a"):
        trajectory.reply([50, made.slot_id])


def test_messages_of_a_trajectory_begin_another(patches):
    tokenizer, made = patches
    one, other = (Trajectory(tokenizer, CHATML, processor=made) for _ in range(2))
    ids = one.prompt([said(A, "x", B)])
    assert other.prompt(one.messages) == ids
    assert other.images == one.images


def test_a_typed_placeholder_is_text(patches):
    tokenizer, made = patches
    trajectory = Trajectory(tokenizer, CHATML, processor=made)
    ids = trajectory.prompt([said("What is <image>?", A)])
    assert [*ids].count(made.slot_id) == made.slots
    assert len(trajectory.images) == 1


def test_a_damaged_image_names_its_message(patches):
    trajectory = Trajectory(patches[0], CHATML, processor=patches[1])
    trajectory.prompt([said(A)])
    trajectory.reply([50])
    with pytest.raises(ConversationError, match=r"from message 2 on: message 1: .*image"):
        trajectory.prompt([said("x"), said(b"no picture")])
    assert len(trajectory.images) == 1


# -- records


def test_a_record_has_the_messages_of_images(patches, tmp_path):
    B.save(tmp_path / "b.png")
    tokenizer, made = patches
    trajectory = Trajectory(
        tokenizer, CHATML, processor=made, image_settings=ImageSettings(image_folder=str(tmp_path))
    )
    for new in ([said(A, "x")], [said("b.png", "y")], [said("z")]):
        new[0]["content"] = [
            {"type": "image", "image": "b.png"} if part.get("text") == "b.png" else part
            for part in new[0]["content"]
        ]
        trajectory.prompt(new)
        trajectory.reply([50], message=REPLY)
    steps = json.loads(json.dumps(trajectory.record()))["steps"]
    urls = [step["messages"][0]["content"][0].get("image") for step in steps]
    assert urls[0].startswith("data:application/octet-stream;base64,")
    assert urls[1] == str(tmp_path / "b.png")
    assert urls[2] is None
