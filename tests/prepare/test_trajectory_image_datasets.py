"""Records and datasets of trajectories with images: an image of a shared beginning is stored once,
those behind a fork belong to their branch.
"""

import json

import numpy as np
import pytest

import penstock as ps
from makers.image_trajectories import (
    CHATML,
    CONTROLS,
    HISTORIES,
    REPLY,
    A,
    B,
    C,
    D,
    family_of,
    forgetting,
    places,
    play,
    said,
)
from makers.tokenizers import tiny_tokenizer
from penstock.chat import Template, TrajectoryReader
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.data.prepare.trajectories import trees_of
from penstock.data.shards.verify import verify
from penstock.media.images import ImageSettings
from penstock.media.patches import PatchProcessor

REPLIES = ["Yes.", "It is a thing.", "No", "Yes. Yes."]
MARKED = ["qwen2_vl", "gemma3", "smolvlm2", "pixtral", "internvl", "glm4v"]
"""Families whose images have markers of rows, tiles or ends."""


@pytest.fixture(scope="module")
def patches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("patches") / "tokenizer"
    tokenizer = tiny_tokenizer(folder, ["What is it? Yes. And this or that"] * 9, 320, CONTROLS)
    template = Template(source=CHATML, name="chatml")
    return tokenizer, template, PatchProcessor(tokenizer, image_size=32, patch=16)


def reader_of(parts, **more):
    tokenizer, template, made = parts
    return TrajectoryReader(
        tokenizer=tokenizer, template=template, processor=made, variables={}, **more
    )


def same(found, expected):
    """Whether paths are equal, images among them."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.weights, other.weights)
        np.testing.assert_allclose(one.log_probabilities, other.log_probabilities)
        assert places(one.images) == places(other.images)


# -- records


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("family", MARKED)
def test_a_record_gives_the_same_paths(family, history):
    tokenizer, template, made = family_of(family)
    template = Template(
        source=forgetting(template.source), name="forgets", variables=template.variables
    )
    parts = tokenizer, template, made
    trajectory = play(parts, REPLIES, history)
    assert any(step.kind == "branch" for step in trajectory.steps) == (history != "sampled")
    record = json.loads(json.dumps(trajectory.record()))
    found = reader_of(parts).read(record)
    same(found.paths, trajectory.paths())
    for step in record["steps"]:
        del step["prompt_ids"]
    same(reader_of(parts, history=history).read(record).paths, trajectory.paths())


def test_sub_agents_with_other_images_keep_their_own(patches):
    one, other = (
        play(patches, REPLIES[:2]),
        play(patches, REPLIES[:2], prompts=[[said(D, "q")]] * 2),
    )
    steps = [
        step
        for pair in zip(one.record()["steps"], other.record()["steps"], strict=True)
        for step in pair
    ]
    found = reader_of(patches).read({"steps": steps})
    same(found.paths, [*one.paths(), *other.paths()][: len(found.paths)])


def test_the_same_ids_of_other_images_are_another_path(patches):
    """Two agents ask the same about two images of one size."""
    one, other = (
        play(patches, REPLIES[:1], prompts=[[said(image, "q")]]).record()["steps"][0]
        for image in (A, D)
    )
    assert one["prompt_ids"] == other["prompt_ids"]
    found = reader_of(patches).read({"steps": [one, other]})
    digests = [path.images[0][0].digest for path in found.paths]
    assert len(set(digests)) == 2
    [document] = trees_of([[found]])
    assert [image.digest for image in document.images] == digests
    assert document.tree.branches[1, 1] == found.paths[0].images[0][1].begin - 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda step: step.pop("messages"),
            r"step 0: its prompt has 4 tokens of images, but the 0 images of its messages take 0",
        ),
        (
            lambda step: step["messages"][0]["content"].append(step["messages"][0]["content"][0]),
            "has 4 tokens of images, but the 2 images of its messages take 8",
        ),
        (
            lambda step: step["prompt_ids"].remove(
                max(step["prompt_ids"], key=step["prompt_ids"].count)
            ),
            "has 3 tokens of images, but the 1 images of its messages take 4",
        ),
        (
            lambda step: step["messages"][0]["content"].insert(
                0, {"type": "image", "image": "missing.png"}
            ),
            "step 0: message 0: .*missing.png",
        ),
    ],
)
def test_ids_and_images_that_differ_are_refused(patches, change, error):
    record = json.loads(json.dumps(play(patches, REPLIES[:1], prompts=[[said(A)]]).record()))
    change(record["steps"][0])
    with pytest.raises(ConversationError, match="record: .*" + error):
        reader_of(patches).read(record)


def test_tokens_between_those_of_an_image_are_refused(patches):
    record = play(patches, REPLIES[:1], prompts=[[said(A)]]).record()
    ids = record["steps"][0]["prompt_ids"]
    at = ids.index(patches[2].slot_id)
    record["steps"][0]["prompt_ids"] = [*ids[: at + 2], 50, *ids[at + 2 :]]
    with pytest.raises(ConversationError, match="with others between them than the processor"):
        reader_of(patches).read(record)


@pytest.mark.parametrize("where", ["record", "step", "flat", "vllm", "messages"])
@pytest.mark.parametrize("given", [True, False])
def test_images_next_to_messages(patches, where, given, tmp_path):
    B.save(tmp_path / "b.png")
    parts = [{"type": "image", "image": str(tmp_path / "b.png")}, {"type": "text", "text": "What?"}]
    expected = play(patches, ["Yes."], prompts=[[{"role": "user", "content": parts}]])
    [step] = expected.record()["steps"]
    step["messages"] = [{"role": "user", "content": "<image>What?"}]
    fields = {"images": ["b.png"]}
    record = {"steps": [step]}
    if where == "vllm":
        fields = {"multi_modal_data": {"image": ["b.png"]}}
        step |= fields
        if given:
            del step["messages"]
    elif where == "messages":
        step["messages"][0] |= fields
    elif where == "flat":
        record = {**step, **fields}
    else:
        (record if where == "record" else step).update(fields)
    if not given:
        del (record if where == "flat" else step)["prompt_ids"]
    file = str(tmp_path / "r.jsonl")
    same(reader_of(patches).read(record, file=file).paths, expected.paths())
    tokenizer, template, _ = patches
    with pytest.raises(ConversationError, match="need the processor"):
        TrajectoryReader(tokenizer=tokenizer, template=template, variables={}).read(record)


def test_a_reader_without_a_processor_refuses_images(patches):
    record = play(patches, REPLIES[:1], prompts=[[said(A)]]).record()
    tokenizer, template, _ = patches
    reader = TrajectoryReader(tokenizer=tokenizer, template=template, variables={})
    with pytest.raises(ConversationError, match=r"step 0: message 0: .*need the processor"):
        reader.read(record)
    del record["steps"][0]["prompt_ids"]
    with pytest.raises(ConversationError, match=r"step 0: .*need the processor"):
        reader.read(record)


# -- datasets


@pytest.fixture
def group(patches):
    """Two answers to one question; the second conversation goes on with other images."""
    questions = [[said(A, "What is it?")], [said("No: ", C)]]
    return [
        play(patches, REPLIES[:2]).finish(reward=1.0, group="a"),
        play(patches, ["Yes.", "Thing"], prompts=questions).finish(reward=0.5, group="a"),
        play(patches, ["Thing"], prompts=questions).finish(reward=0.0, group="a"),
        play(patches, ["Yes."], prompts=[[said(D)]]).finish(reward=0.0, group="b"),
    ]


@pytest.fixture
def written(group, patches, tmp_path):
    tokenizer, _, made = patches
    return ps.write_trajectories(tmp_path / "data", group, tokenizer=tokenizer, processor=made)


def test_shared_images_are_stored_once(group, written, patches):
    assert len(written) == 2
    first = written[0]
    digests = [image.digest for image in first.images]
    of_paths = [[image.digest for image, _ in one.paths[0].images] for one in group[:3]]
    assert [len(one) for one in of_paths] == [3, 2, 1]
    # A once; B and C of the first; C of the second.
    assert sorted(digests) == sorted([*of_paths[0], of_paths[1][1]])
    for number, one in enumerate(group[:3]):
        slots = first.tree.slots(number)
        [path] = one.paths
        np.testing.assert_array_equal(first.tokens[slots], path.ids)
        found = [
            (int(np.searchsorted(slots, image.begin)), image.digest)
            for image in first.images
            if image.begin in slots
        ]
        assert found == [(place.begin, image.digest) for image, place in path.images]
    assert not verify(written.path).faults
    assert written.media.fingerprint == patches[2].fingerprint
    assert written[1].images[0].read() == group[3].paths[0].images[0][0].read()


def test_paths_may_be_stored_apart(group, written, patches, tmp_path):
    tokenizer, _, made = patches
    apart = ps.write_trajectories(
        tmp_path / "apart", group, tokenizer=tokenizer, processor=made, share=False
    )
    assert not apart[0].tree.forked
    assert len(apart[0].images) == 6
    assert apart.num_tokens == sum(len(one.paths[0].ids) for one in group)
    assert written.num_tokens < apart.num_tokens


def test_images_need_a_processor_and_the_right_one(group, patches, tmp_path):
    tokenizer, _, _ = patches
    with pytest.raises(ConfigError, match="trajectory 0 has images; give the processor"):
        ps.write_trajectories(tmp_path / "data", group, tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="has 0 slots by this processor, expected 4"):
        ps.write_trajectories(
            tmp_path / "data", group, tokenizer=tokenizer, processor=family_of("qwen2_vl")[2]
        )


def test_trajectories_without_images_may_come_with_a_processor(patches, tmp_path):
    tokenizer, _, made = patches
    plain = play(patches, ["Yes."], prompts=[[said("What?")]]).finish(reward=1.0)
    data = ps.write_trajectories(
        tmp_path / "rounds", [plain], tokenizer=tokenizer, processor=made, append=True
    )
    assert data[0].images == ()
    with_image = play(patches, ["Yes."], prompts=[[said(A)]]).finish(reward=1.0)
    ps.write_trajectories(
        tmp_path / "rounds", [with_image], tokenizer=tokenizer, processor=made, append=True
    )
    both = ps.open_dataset(str(tmp_path / "rounds" / "*"))
    assert [len(one.images) for one in both] == [0, 1]


def write_files(folder, patches):
    """A folder with a processor, an image and records that name it."""
    patches[2].save(folder / "processor")
    B.save(folder / "b.png")
    steps = [
        {
            "messages": [
                {"role": "user", "content": "<image>What?", "images": ["b.png"]},
            ],
            "response_ids": [50, 51],
            "log_probabilities": [-0.5, -0.5],
            "message": REPLY,
        },
        {"messages": [said("x")], "response_ids": [52], "log_probabilities": [-0.5]},
    ]
    lines = [json.dumps({"group": "g", "reward": reward, "steps": steps}) for reward in (1, 0)]
    (folder / "r.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "r.jsonl"


def test_prepare_finds_images_next_to_their_file(patches, tmp_path):
    source = write_files(tmp_path, patches)
    data = ps.prepare_trajectories(
        source,
        tokenizer=patches[0],
        processor=tmp_path / "processor",
        output=tmp_path / "data",
        progress=False,
    )
    assert len(data) == 1
    [image] = data[0].images
    assert image.read() == (tmp_path / "b.png").read_bytes()
    assert image.name == str(tmp_path / "b.png")
    kept = ps.prepare_trajectories(
        source,
        tokenizer=patches[0],
        processor=tmp_path / "processor",
        image_settings=ImageSettings(image_storage="reference", alpha="black"),
        output=tmp_path / "kept",
        progress=False,
    )
    assert kept[0].images[0].reference is not None
    assert kept.media.settings["alpha"] == "black"
    (tmp_path / "b.png").unlink()
    with pytest.raises(RecordError, match=r"r.jsonl:1: step 0: .*b.png"):
        ps.prepare_trajectories(
            source, tokenizer=patches[0], processor=tmp_path / "processor", output=tmp_path / "no"
        )


def test_prepare_from_the_shell(patches, tmp_path, command_line):
    source = write_files(tmp_path, patches)
    code, _, errors = command_line(
        *("prepare", source, "--trajectories", "-t", tmp_path / "processor", "--quiet"),
        *(
            "--processor",
            tmp_path / "processor",
            "-o",
            tmp_path / "data",
            "--shrink-pixels",
            5000,
            "--no-share",
        ),
    )
    assert not code, errors
    data = ps.open_dataset(tmp_path / "data")
    assert len(data[0].images) == 2
    assert data.media.settings["shrink_pixels"] == 5000


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"image_settings": ImageSettings()}, "image_settings need a processor"),
    ],
)
def test_settings_that_do_nothing_are_refused(patches, tmp_path, given, error):
    source = write_files(tmp_path, patches)
    (tmp_path / "r.jsonl").write_text('{"prompt_ids": [5, 6], "response_ids": [50]}\n')
    with pytest.raises(ConfigError, match=error):
        ps.prepare_trajectories(source, tokenizer=patches[0], output=tmp_path / "data", **given)
