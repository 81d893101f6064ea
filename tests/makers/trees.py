"""Random prefix trees, and the slow, obvious check of one."""

import random

import numpy as np

from penstock import ModelInput, write_dataset
from penstock.data.shards.format.tree_building import build_tree
from penstock.data.shards.memory import weight_spans
from penstock.plan.inputs import IGNORE, AttentionRule


def random_paths(generator, *, most=6, vocabulary=4, longest=30):
    """Token sequences that often share a beginning, and sometimes are equal or end inside each
    other.
    """
    paths = []
    for _ in range(generator.randint(1, most)):
        if paths and generator.random() < 0.8:
            base = generator.choice(paths)
            base = base[: generator.randint(0, len(base))]
        else:
            base = [generator.randrange(vocabulary) for _ in range(generator.randint(1, longest))]
        path = base + [generator.randrange(vocabulary) for _ in range(generator.randint(0, 5))]
        paths.append(path or [0])
    return paths


def tree_dataset(folder, *, seed=0, documents=40, share=True, chains=0.3, vocabulary=90, prompt=20):
    """A dataset of answers to prompts, some of them equal, with ranks, labels, rewards and a
    column; and its paths.

    With the same seed, `share` changes nothing but whether beginnings are stored once.
    """
    generator, rows, spans, trees, column, paths = random.Random(seed), [], [], [], [], []
    for _ in range(documents):
        if generator.random() < chains:
            ids = [generator.randrange(vocabulary) for _ in range(generator.randint(2, prompt))]
            rows.append(ids)
            spans.append([(1, len(ids), 1.0)])
            trees.append(None)
            column.append(np.arange(len(ids), dtype=np.float32))
            paths.append([ids])
            continue
        start = [generator.randrange(vocabulary) for _ in range(generator.randint(1, prompt))]
        count = generator.randint(2, 4)
        answers = [
            [generator.randrange(5) for _ in range(generator.randint(1, 8))] for _ in range(count)
        ]
        some = [start + answer for answer in answers]
        built = build_tree(
            some,
            [[0.0] * len(start) + [1.0] * (len(path) - len(start)) for path in some],
            values={
                "rank": [float(min(number, 1)) for number in range(count)],
                "label": [1.0, 0.0, -1.0, -1.0][:count],
                "reward": [generator.random() for _ in some],
            },
            columns={"order": [np.arange(len(path), dtype=np.float32) for path in some]},
            share=share,
        )
        rows.append(built.tokens)
        spans.append(weight_spans(built.loss_weights))
        trees.append(built.tree)
        column.append(built.columns["order"])
        paths.append(some)
    dataset = write_dataset(
        folder,
        rows,
        spans=spans,
        trees=trees,
        columns={"order": column},
        fills={"order": -1},
        vocab_size=vocabulary,
    )
    return dataset, paths


def check_tree(built, paths, weights, *, alike):
    """Hold a tree against its paths: tokens, positions, who sees whom, and the sums of weights."""
    count = len(built.tokens)
    built.tree.check(count)
    starts, ends, positions = built.tree.nodes(count)
    reach = np.repeat(ends, np.diff([*starts, count]))
    sums = np.zeros(count)
    for number, path in enumerate(paths):
        slots = built.tree.slots(number)
        assert built.tokens[slots].tolist() == path
        assert positions[slots].tolist() == list(range(len(path)))
        for place, query in enumerate(slots.tolist()):
            seen = [key for key in range(count) if key <= query < reach[key]]
            assert seen == slots[: place + 1].tolist()
        targets = slots[:-1] + 1
        assert built.tokens[targets].tolist() == path[1:]
        np.add.at(sums, targets, weights[number][1:])
        if alike:
            assert (
                (built.loss_weights[targets] != 0) == (np.array(weights[number][1:]) != 0)
            ).all()
    np.testing.assert_array_equal(sums, built.loss_weights)


def random_forest(seed: int, padding: int = 0) -> ModelInput:
    """A row of prefix trees with targets, up to four nodes deep, then padding.

    A slot's target is the token that follows it in the row; the last slot of a document has none.
    """
    random = np.random.default_rng(seed)
    pieces: list[int] = []
    reach: list[int] = []
    last: list[int] = []

    def node(begin: int, depth: int) -> int:
        number, end = len(pieces), begin + int(random.integers(1, 7))
        pieces.append(begin)
        reach.append(end)
        for _ in range(random.choice([0, 0, 2, 3]) if depth < 4 else 0):
            end = node(end, depth + 1)
        reach[number] = end
        return end

    end = 0
    for _ in range(random.integers(1, 4)):
        end = node(end, 1)
        last.append(end - 1)
    slots = end + padding
    bounds = [*pieces, end, slots] if padding else [*pieces, slots]
    reach = [*reach, slots] if padding else reach
    begins, ends = np.array(bounds[:-1]), np.array(bounds[1:])
    rule = AttentionRule(np.stack([begins, begins, ends], 1), np.array(reach))
    tokens = random.integers(0, 61, slots)
    targets = np.full((1, slots), IGNORE)
    targets[0, :-1] = tokens[1:]
    targets[0, last] = targets[0, end:] = IGNORE
    weights = (random.random((1, slots)) * (targets != IGNORE)).astype(np.float32)
    return ModelInput(
        tokens=tokens,
        targets=targets,
        loss_weights=weights,
        positions=rule.positions,
        document_ids=rule.document_ids,
        cu_seqlens=rule.cu_seqlens,
        max_seqlen=int((ends - begins).max()),
        num_tokens=end,
        source_ids=np.zeros(len(last), np.int32),
        reach=np.array(reach, np.int32),
    )
