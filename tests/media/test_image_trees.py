"""Prefix trees with images: forks lie outside images, and each path is read as it is alone."""

import json
import random

import numpy as np
import pytest
import torch

import penstock as ps
from makers.image_data import model_folder
from makers.image_trajectories import (
    CHATML,
    CONTROLS,
    HISTORIES,
    A,
    B,
    C,
    D,
    family_of,
    play,
    said,
)
from makers.media import model
from makers.tokenizers import tiny_tokenizer
from penstock.chat import Template, Trajectory
from penstock.core.errors import ConfigError
from penstock.data.shards.format.images import ImageOf
from penstock.data.shards.format.tree_building import build_tree
from penstock.data.shards.verify import verify
from penstock.learn.generation import Engine, Sampling
from penstock.learn.training.losses import row_loss
from penstock.media import load_processor
from penstock.media.patches import PatchProcessor
from penstock.media.rows import blank_image
from penstock.models.theirs.model import HuggingFaceModel

SLOT = 99


def image_of(begin, slots, name):
    return ImageOf(
        begin=begin,
        end=begin + slots,
        slots=slots,
        patches=slots,
        height=1,
        width=slots,
        digest=name.encode() * 16,
        read=bytes,
    )


def random_paths(order):
    """Paths of texts and images of 1 to 3 tokens, which often begin alike."""
    pieces = [[order.choice("abx") for _ in range(order.randint(1, 6))] for _ in range(5)]
    paths, images = [], []
    for number in range(order.randint(1, 6)):
        chosen = pieces[order.randrange(2)] + pieces[order.randrange(5)]
        ids, found = [], []
        for one in chosen:
            if one == "x":
                ids.append(order.randrange(2) if order.random() < 0.3 else 0)
            else:
                slots = 2 if order.random() < 0.8 else 3
                found.append(image_of(len(ids), slots, one))
                ids += [SLOT] * slots
        paths.append([*ids, 7 + number % 2])
        images.append(found)
    return paths, images


def as_read(path, images):
    """What a model reads of a path: ids, and images at their tokens."""
    read = [*path]
    for one in images:
        for place in range(one.begin, one.end):
            read[place] = (one.digest, place - one.begin, one.end - one.begin)
    return read


@pytest.mark.parametrize("seed", range(150))
def test_each_path_has_its_tokens_and_images(seed):
    paths, images = random_paths(random.Random(seed))
    built = build_tree(paths, images=images)
    built.tree.check(len(built.tokens))
    read = as_read(built.tokens.tolist(), built.images)
    for number, (path, own) in enumerate(zip(paths, images, strict=True)):
        slots = built.tree.slots(number)
        assert [read[slot] for slot in slots] == as_read(path, own)
    # Each image is whole in one branch.
    begins = built.tree.branches[:, 0]
    for one in built.images:
        assert not ((begins > one.begin) & (begins < one.end)).any()
    assert [one.begin for one in built.images] == sorted(one.begin for one in built.images)


@pytest.mark.parametrize("seed", range(30))
def test_without_images_trees_are_as_before(seed):
    paths, _ = random_paths(random.Random(seed))
    built, plain = build_tree(paths, images=[[] for _ in paths]), build_tree(paths)
    np.testing.assert_array_equal(built.tokens, plain.tokens)
    np.testing.assert_array_equal(built.tree.branches, plain.tree.branches)


def test_images_outside_their_path_are_refused():
    with pytest.raises(ConfigError, match="path 0: an image with tokens 1 to 3 of 2"):
        build_tree([[1, 2]], images=[[image_of(1, 2, "a")]])
    with pytest.raises(ConfigError, match="images: 1 lists for 2 paths"):
        build_tree([[1], [2]], images=[[]])


# -- models


QUESTIONS = [[said(A, "What is it?")], [said("No: ", C)]]
PLAYS = [
    (["Yes.", "It is a thing."], QUESTIONS),
    (["Yes.", "It is."], [QUESTIONS[0], [said(B, D, "?")]]),
    (["Thing"], QUESTIONS),
    (["Yes."], [[said("Only text.")]]),
]


def datasets(parts, folder, **more):
    """The plays as one group: a tree, and paths apart."""
    tokenizer, _, made = parts
    finished = [
        play(parts, replies, prompts=prompts).finish(reward=float(number), group="a")
        for number, (replies, prompts) in enumerate(PLAYS)
    ]
    return [
        ps.write_trajectories(
            folder / str(share), finished, tokenizer=tokenizer, processor=made, share=share, **more
        )
        for share in (True, False)
    ]


def row_of(dataset, wrapped):
    loader = ps.Loader(
        ps.Source(dataset.path, max_epochs=1),
        requirements=wrapped.requirements(),
        sequence_length=1024,
        rows_per_step=1,
    )
    step = next(iter(loader))
    return step, step[0]


def slots_of(row, path):
    begin, end = row.paths.starts[path : path + 2]
    return row.paths.slots[begin:end]


def opened(family, home):
    folder = model_folder(home / family, family)
    tokenizer = ps.load_tokenizer(folder)
    _, template, _ = family_of(family)
    return (tokenizer, template, load_processor(folder)), HuggingFaceModel(model(family).double())


def own_model(home):
    tokenizer = tiny_tokenizer(home / "t", ["What is it? Yes. And this or that"] * 9, 320, CONTROLS)
    made = PatchProcessor(tokenizer, image_size=32, patch=16)
    vision = {
        "image_token": made.slot_id,
        "image_size": 32,
        "patch": 16,
        "layers": 1,
        "width": 32,
        "heads": 2,
    }
    wrapped = ps.build_model(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        width=32,
        heads=2,
        dtype="float64",
        init_std=0.3,
        vision=vision,
    )
    return (tokenizer, Template(source=CHATML, name="chatml"), made), wrapped


@pytest.mark.parametrize("family", ["ours", "qwen2_vl", "qwen3_vl", "smolvlm2", "pixtral"])
def test_paths_of_a_tree_are_read_as_alone(family, tmp_path):
    parts, wrapped = own_model(tmp_path) if family == "ours" else opened(family, tmp_path)
    results = []
    for dataset in datasets(parts, tmp_path):
        step, row = row_of(dataset, wrapped)
        with torch.no_grad():
            logits = wrapped.logits(wrapped(wrapped.tensors(row)))[0]
        wrapped.zero_grad()
        row_loss(wrapped, wrapped.tensors(row), step.loss_denominators).loss.backward()
        grads = {n: p.grad.clone() for n, p in wrapped.named_parameters() if p.grad is not None}
        results.append((row, logits, grads))
    (tree, shared, one), (apart, alone, other) = results
    assert tree.reach is not None
    assert apart.reach is None
    assert (len(tree.media), len(apart.media)) == (4, 6)
    for path in range(len(PLAYS)):
        mine, theirs = slots_of(tree, path), slots_of(apart, path)
        np.testing.assert_array_equal(tree.tokens[mine], apart.tokens[theirs])
        np.testing.assert_array_equal(tree.positions[mine], apart.positions[theirs])
        if tree.media.positions is not None:
            np.testing.assert_array_equal(
                tree.media.positions[:, :, mine], apart.media.positions[:, :, theirs]
            )
        gap = (shared[mine] - alone[theirs]).abs().max() / alone[theirs].std()
        assert gap < 1e-9, (path, float(gap))
    assert one.keys() == other.keys()
    largest = max(float(grad.abs().max()) for grad in one.values())
    assert largest > 0
    # Norms of transformers compute in float32.
    allowed = (1e-9 if family == "ours" else 1e-7) * largest
    # Norms of transformers compute in float32.
    allowed = (1e-9 if family == "ours" else 1e-7) * largest
    for name, grad in one.items():
        assert float((grad - other[name]).abs().max()) < allowed, name


def test_a_model_that_reads_images_in_its_own_way_refuses_trees(tmp_path):
    parts, wrapped = opened("gemma3", tmp_path)
    tree, apart = datasets(parts, tmp_path)
    _, row = row_of(tree, wrapped)
    with pytest.raises(ConfigError, match="knows nothing of the branches of prefix trees"):
        wrapped.tensors(row)
    fresh = HuggingFaceModel(model("gemma3").double())
    _, row = row_of(apart, fresh)
    with torch.no_grad():
        assert torch.isfinite(fresh.logits(fresh(fresh.tensors(row)))).all()


def test_a_policy_learns_from_trees_with_images(tmp_path):
    parts, _ = own_model(tmp_path)
    lines = []
    for number, dataset in enumerate(datasets(parts, tmp_path)):
        _, wrapped = own_model(tmp_path / str(number))
        loader = ps.Loader(
            ps.Source(dataset.path),
            requirements=wrapped.requirements(),
            sequence_length=1024,
            rows_per_step=1,
        )
        found = ps.train(
            wrapped,
            loader,
            output=tmp_path / f"run{number}",
            policy={},
            steps=3,
            threads=1,
            learning_rate=1e-3,
            progress=False,
        )
        lines.append([step["loss"] for step in found.metrics])
    np.testing.assert_allclose(lines[0], lines[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["ours", "qwen2_vl"])
def test_what_our_engine_sampled_is_what_is_trained(family, tmp_path):
    """Its log-probabilities are those of the row in training, over several turns with images."""
    parts, wrapped = own_model(tmp_path) if family == "ours" else opened(family, tmp_path)
    tokenizer, template, made = parts
    engine = Engine(
        wrapped,
        tokenizer,
        context_length=512,
        stop_ids=[tokenizer.special_tokens["<|im_end|>"]],
        images=blank_image(made),
    )
    finished = []
    for number, history in enumerate(HISTORIES):
        trajectory = Trajectory(tokenizer, template, processor=made, history=history)
        for turn, new in enumerate([QUESTIONS[0], [said("No: ", C, B)], [said("So?")]]):
            ids = trajectory.prompt(new)
            sampling = Sampling(max_tokens=4, logprobs=0, seed=10 * number + turn)
            [written] = engine.generate_all([ids], sampling, images=[trajectory.prompt_images()])
            logs = [step.token for step in written.logprobs]
            trajectory.reply(written.tokens, logs, finish_reason=written.finish_reason)
        finished.append(trajectory.finish(reward=float(number), group="a"))
    data = ps.write_trajectories(tmp_path / "data", finished, tokenizer=tokenizer, processor=made)
    _, row = row_of(data, wrapped)
    assert row.reach is not None
    with torch.no_grad():
        logits = wrapped.logits(wrapped(wrapped.tensors(row)))[0]
    trained = np.flatnonzero(row.loss_weights[0] > 0)
    targets = torch.from_numpy(row.targets[0][trained].astype(np.int64))
    found = torch.log_softmax(logits[trained].double(), -1)[torch.arange(len(trained)), targets]
    # The column has the number of each token; the slot before it has it as its target.
    stored = row.columns["log_probabilities"][trained + 1]
    assert len(trained) >= 9
    np.testing.assert_allclose(found.numpy(), stored, atol=2e-5)


# -- preferences


def preference_data(home, records, **more):
    (home / "r.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return [
        ps.prepare(
            home / "r.jsonl",
            tokenizer=home / "processor",
            processor=home / "processor",
            template="auto",
            answers=answers,
            output=home / answers,
            progress=False,
            **more,
        )
        for answers in ("tree", "separate")
    ]


def test_preferences_with_images(tmp_path):
    (_, _, made), _ = own_model(tmp_path)
    made.save(tmp_path / "processor")
    for number, image in enumerate((A, B, C, D)):
        image.save(tmp_path / f"{number}.png")
    records = [
        {
            "images": [f"{number}.png", "0.png"],
            "prompt": [{"role": "user", "content": "<image>What is <image> it?"}],
            "chosen": [{"role": "assistant", "content": "a thing"}],
            "rejected": [{"role": "assistant", "content": "this or that"}],
        }
        for number in range(4)
    ]
    # The same answer to another image: only the image tells them apart.
    asked = [
        [
            {"role": "user", "content": [{"type": "image", "image": name}]},
            said("Yes.", role="assistant"),
        ]
        for name in ("0.png", "3.png")
    ]
    records.append({"chosen": asked[0], "rejected": asked[1]})
    found, losses = preference_data(tmp_path, records), []
    tree, apart = found
    assert [len(one.images) for one in tree] == [2, 2, 2, 2, 2]
    assert [len(one.images) for one in apart] == [4, 4, 4, 4, 2]
    assert tree[4].images[0].digest != tree[4].images[1].digest
    assert not verify(tree.path).faults
    for number, dataset in enumerate(found):
        _, wrapped = own_model(tmp_path / f"m{number}")
        loader = ps.Loader(
            ps.Source(dataset.path, max_epochs=1),
            requirements=wrapped.requirements(),
            sequence_length=1024,
            rows_per_step=1,
        )
        run = ps.train(
            wrapped,
            loader,
            output=tmp_path / f"run{number}",
            preference={"reference": "initial"},
            steps=1,
            threads=1,
            learning_rate=1e-3,
            progress=False,
        )
        losses.append([run.metrics[0][name] for name in ("loss", "gradient_norm")])
    assert losses[0][1] > 0
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
