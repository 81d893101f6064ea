"""Records with several answers: every form becomes the same tree; what is no comparison is refused
with its place.
"""

import itertools
import json

import numpy as np
import pytest
from prepare_cases import contents

from makers.datasets import prepare_here
from makers.texts import write_json_lines
from makers.tokenizers import CHATML
from penstock import Dataset, Loader, Source, chat
from penstock.core.errors import ConfigError, ConversationError, RecordError
from penstock.data.shards import verify

QUESTION = "How deep is the water?"
GOOD, BAD, WORSE = "Two metres, says the pipe.", "Two feet, says the pipe.", "Who knows."
ASKED = [{"role": "user", "content": QUESTION}]


def said(text):
    return [{"role": "assistant", "content": text}]


PAIRS = {
    "prompt and texts": {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD},
    "prompt and messages": {"prompt": ASKED, "chosen": said(GOOD), "rejected": said(BAD)},
    "one message": {"prompt": QUESTION, "chosen": said(GOOD)[0], "rejected": said(BAD)[0]},
    "whole conversations": {"chosen": ASKED + said(GOOD), "rejected": ASKED + said(BAD)},
    "messages before": {"messages": ASKED, "chosen": said(GOOD), "rejected": said(BAD)},
    "sharegpt": {
        "conversations": [{"from": "human", "value": QUESTION}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "HH-RLHF": {
        "chosen": f"\n\nHuman: {QUESTION}\n\nAssistant: {GOOD}",
        "rejected": f"\n\nHuman: {QUESTION}\n\nAssistant: {BAD}",
    },
    "instruction": {"instruction": QUESTION, "chosen": GOOD, "rejected": BAD},
    "scores": {"prompt": QUESTION, "responses": [GOOD, BAD], "scores": [9, 2.5]},
    "ranks": {"prompt": QUESTION, "completions": [GOOD, BAD], "ranks": [1, 2]},
    "arena": {
        "conversation_a": ASKED + said(BAD),
        "conversation_b": ASKED + said(GOOD),
        "winner": "model_b",
    },
}


@pytest.mark.parametrize("form", PAIRS)
def test_every_form_of_a_pair(chat_tokenizer, tmp_path, form):
    write_json_lines(tmp_path / "raw.jsonl", [PAIRS[form]] * 2)
    report = prepare_here(
        tmp_path / "raw.jsonl",
        chat_tokenizer,
        output=tmp_path / "d",
        template=CHATML,
        answers="tree",
    )
    dataset = Dataset.open(tmp_path / "d")
    document = dataset[0]
    texts = [
        dataset.loaded_tokenizer.decode(document.tokens[document.tree.slots(path)])
        for path in range(2)
    ]
    better = int(np.argmin(document.tree.value("rank")))
    for text, answer in ((texts[better], GOOD), (texts[1 - better], BAD)):
        assert (
            text
            == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"  # noqa: E501
        )
    assert document.tree.pairs().tolist() == [[better, 1 - better]]
    # The common beginning of the answers is trained in both.
    for path, answer in ((better, GOOD), (1 - better, BAD)):
        slots = document.tree.slots(path)
        trained = slots[:-1][document.loss_weights[slots[:-1] + 1] != 0]
        words = dataset.loaded_tokenizer.decode(document.tokens[trained + 1])
        assert answer in words.replace("<|im_end|>", "") or words.startswith("Two")
        assert words.endswith("<|im_end|>")
    assert document.loss_weights.max() == 2
    assert "4 in 2 documents, 2 pairs" in report.as_text()
    assert verify(tmp_path / "d").sound


def test_a_tree_stores_what_separate_stores_twice(chat_tokenizer, tmp_path):
    write_json_lines(tmp_path / "raw.jsonl", list(PAIRS.values()))
    sizes = {}
    for answers in ("tree", "separate", "best"):
        how = {"answers": answers, "on_error": "skip"}
        prepare_here(
            tmp_path / "raw.jsonl",
            chat_tokenizer,
            output=tmp_path / answers,
            template=CHATML,
            **how,
        )
        sizes[answers] = Dataset.open(tmp_path / answers).num_tokens
    tree, separate = (Dataset.open(tmp_path / answers) for answers in ("tree", "separate"))
    for one, other in zip(tree, separate, strict=True):
        for path in range(2):
            tokens = [
                document.tokens[document.tree.slots(path)].tolist() for document in (one, other)
            ]
            assert tokens[0] == tokens[1]
        assert not other.tree.forked
    assert sizes["tree"] < 0.8 * sizes["separate"]
    # Without a word, only the best answer is there, and nothing is compared.
    assert Dataset.open(tmp_path / "best").extras is None
    rows = [row for step in _once(separate) for row in step]
    assert all(row.reach is None for row in rows)


def _once(dataset):
    return Loader(Source(dataset, max_epochs=1), sequence_length=512, rows_per_step=1, threads=0)


def test_ranked_lists_and_ties(chat_tokenizer, tmp_path):
    record = {"prompt": QUESTION, "responses": [BAD, GOOD, WORSE, "Two."], "scores": [1, 5, 0, 1]}
    write_json_lines(tmp_path / "raw.jsonl", [record])
    prepare_here(
        tmp_path / "raw.jsonl",
        chat_tokenizer,
        output=tmp_path / "d",
        template=CHATML,
        answers="tree",
    )
    tree = Dataset.open(tmp_path / "d")[0].tree
    assert tree.value("rank").tolist() == [1, 0, 2, 1]
    assert sorted(tree.pairs().tolist()) == [[0, 2], [1, 0], [1, 2], [1, 3], [3, 2]]


def test_labels_have_mismatched_answers(chat_tokenizer, tmp_path):
    records = [
        {
            "prompt": f"{QUESTION} {number}",
            "completion": f"{GOOD} {number}",
            "label": bool(number % 2),
        }
        for number in range(4)
    ]
    write_json_lines(tmp_path / "raw.jsonl", records)
    prepare_here(
        tmp_path / "raw.jsonl",
        chat_tokenizer,
        output=tmp_path / "d",
        template=CHATML,
        answers="tree",
    )
    dataset = Dataset.open(tmp_path / "d")
    for number, document in enumerate(dataset):
        assert document.tree.value("label").tolist() == [number % 2, -1]
        own, other = (
            dataset.loaded_tokenizer.decode(document.tokens[document.tree.slots(p)])
            for p in range(2)
        )
        assert f"{QUESTION} {number}" in own and f"{QUESTION} {number}" in other  # noqa: PT018
        assert f"{GOOD} {number}" in own
        assert f"{GOOD} {(number - 1) % 4}" in other


def make_oasst(text, *replies, role="prompter", **more):
    return {"message_id": text, "role": role, "text": text, "replies": list(replies), **more}


def test_oasst_trees(chat_tokenizer, tmp_path):
    def answer(text, rank, *replies):
        return make_oasst(text, *replies, role="assistant", rank=rank)

    more = make_oasst("And wide?", answer("Five.", 1), answer("Six.", 0))
    tree = {"prompt": make_oasst(QUESTION, answer(GOOD, 0, more), answer(BAD, 1), answer(WORSE, 2))}
    write_json_lines(tmp_path / "raw.jsonl", [tree])
    prepare_here(
        tmp_path / "raw.jsonl",
        chat_tokenizer,
        output=tmp_path / "r",
        template=CHATML,
        answers="tree",
        oasst_paths="ranked",
    )
    ranked = Dataset.open(tmp_path / "r")
    assert [document.tree.num_pairs for document in ranked] == [3, 1]
    prepare_here(
        tmp_path / "raw.jsonl",
        chat_tokenizer,
        output=tmp_path / "a",
        template=CHATML,
        answers="tree",
        oasst_paths="all",
    )
    (whole,) = Dataset.open(tmp_path / "a")
    assert len(whole.tree.paths) == 4
    assert np.isnan(whole.tree.values).all()
    once = {"oasst_paths": "all", "answers": "tree", "shared_weights": "once"}
    prepare_here(
        tmp_path / "raw.jsonl", chat_tokenizer, output=tmp_path / "o", template=CHATML, **once
    )
    assert Dataset.open(tmp_path / "o")[0].loss_weights.max() == 1
    # A target that several paths hold counts once for each: the first word of two answers, in three
    # paths.
    assert whole.loss_weights.max() == 3


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": QUESTION, "chosen": GOOD}, 'no "rejected" answer'),
        ({"prompt": QUESTION, "chosen": GOOD, "rejected": GOOD}, "all answers are the same"),
        ({"prompt": QUESTION, "chosen": GOOD, "rejected": ""}, "an answer is empty"),
        ({"chosen": ASKED + said(GOOD), "rejected": ASKED}, "an answer is empty"),
        ({"prompt": QUESTION, "responses": [GOOD, BAD]}, 'without "scores" or "ranks"'),
        (
            {"prompt": QUESTION, "responses": [GOOD, BAD], "scores": [1]},
            "expected a number for each of 2",
        ),
        ({"prompt": QUESTION, "completion": GOOD, "label": "yes"}, "expected true or false"),
        (
            {
                "conversation_a": ASKED + said(BAD),
                "conversation_b": ASKED + said(GOOD),
                "winner": "tie",
            },
            "neither",
        ),
    ],
)
def test_what_is_no_comparison_is_a_reject(chat_tokenizer, tmp_path, record, reason):
    write_json_lines(tmp_path / "raw.jsonl", [PAIRS["scores"], record])
    with pytest.raises(ConversationError, match=reason):
        chat.records.answers.read_answers(record, chat.LayoutSettings(answers="tree"), "here:2")
    report = prepare_here(
        tmp_path / "raw.jsonl",
        chat_tokenizer,
        output=tmp_path / "d",
        template=CHATML,
        answers="tree",
        on_error="skip",
    )
    assert report.rejects == 1
    (line,) = (tmp_path / "d" / "rejected.jsonl").read_text().splitlines()
    assert reason in json.loads(line)["reason"]


def test_processes_and_kills_change_nothing(chat_tokenizer, tmp_path):
    write_json_lines(tmp_path / "raw.jsonl", list(PAIRS.values()) * 20)
    for number, processes in enumerate((1, 2)):
        prepare_here(
            tmp_path / "raw.jsonl",
            chat_tokenizer,
            output=tmp_path / str(number),
            template=CHATML,
            answers="tree",
            processes=processes,
            part_bytes=2000,
        )
    assert contents(tmp_path / "0") == contents(tmp_path / "1")
    # Parts of the earlier run are used again.
    write_json_lines(tmp_path / "raw.jsonl", list(PAIRS.values()) * 21)
    again = prepare_here(
        tmp_path / "raw.jsonl",
        chat_tokenizer,
        output=tmp_path / "0",
        template=CHATML,
        answers="tree",
        processes=1,
        part_bytes=2000,
    )
    assert again.parts_resumed
    assert verify(tmp_path / "0").sound


@pytest.mark.parametrize(
    "options",
    [{"answers": "both"}, {"oasst_paths": "ranked"}, {"answers": "tree", "oasst_paths": "some"}],
)
def test_settings_are_checked(options):
    with pytest.raises(ConfigError, match=r"answers|oasst_paths"):
        chat.LayoutSettings(**options)


def test_numbers_of_records_become_columns(chat_tokenizer, tmp_path):
    """Of texts: one number, or ranges of characters. Of chats: one number, or one for each
    message.
    """
    text = "größe of the 🙂 pipe"
    records = [
        {"text": text, "quality": 0.5, "lines": 7, "parts": [{"begin": 0, "end": 5, "value": 2.0}]},
        {"text": text, "quality": None, "parts": [{"begin": 6, "end": 12, "value": -1.5}]},
    ]
    write_json_lines(tmp_path / "texts.jsonl", records)
    kinds = {"quality": "float64", "lines": "int64", "parts": "ranges"}
    prepare_here(
        tmp_path / "texts.jsonl",
        chat_tokenizer,
        tmp_path / "t",
        columns=kinds,
        token_columns=list(kinds),
        add_eos="yes",
    )
    first, second = Dataset.open(tmp_path / "t")
    assert (set(first.columns["quality"]), set(second.columns["quality"])) == ({0.5}, {0})
    assert (first.columns["lines"].dtype, set(first.columns["lines"])) == (np.int32, {7})
    for document, record in zip((first, second), records, strict=True):
        # Between BOS and EOS.
        decoded = [
            chat_tokenizer.decode(document.tokens[1 : n + 1])
            for n in range(1, len(document.tokens) - 1)
        ]
        for number, so_far in enumerate(decoded, 1):
            last = len(so_far.rstrip("\ufffd")) - 1
            if so_far.endswith("\ufffd"):
                continue
            values = [
                part["value"] for part in record["parts"] if part["begin"] <= last < part["end"]
            ]
            assert document.columns["parts"][number] == (values or [0])[0]
        assert document.columns["parts"][-1] == 0
    chats = [
        {"messages": ASKED + said(GOOD), "score": 0.25, "per": [1, 2]},
        {"messages": ASKED + said(BAD), "per": [None, 3]},
    ]
    write_json_lines(tmp_path / "chats.jsonl", chats)
    prepare_here(
        tmp_path / "chats.jsonl",
        chat_tokenizer,
        tmp_path / "c",
        template=CHATML,
        token_columns=["score", "per"],
    )
    one, other = Dataset.open(tmp_path / "c")
    assert set(one.columns["score"]) == {0.25}
    assert not other.columns["score"].any()
    assert [int(value) for value, _ in itertools.groupby(one.columns["per"])] == [1, 2]
    assert [int(value) for value, _ in itertools.groupby(other.columns["per"])] == [0, 3]
    pairs = [{**PAIRS["scores"], "score": 0.5}]
    write_json_lines(tmp_path / "pairs.jsonl", pairs)
    prepare_here(
        tmp_path / "pairs.jsonl",
        chat_tokenizer,
        tmp_path / "p",
        template=CHATML,
        token_columns=["score"],
        answers="tree",
    )
    assert set(Dataset.open(tmp_path / "p")[0].columns["score"]) == {0.5}


def test_columns_of_no_numbers_are_refused(chat_tokenizer, tmp_path):
    write_json_lines(
        tmp_path / "raw.jsonl", [{"messages": ASKED + said(GOOD), "score": "high"}] * 2
    )
    with pytest.raises(RecordError, match="expected a number"):
        prepare_here(
            tmp_path / "raw.jsonl",
            chat_tokenizer,
            tmp_path / "d",
            template=CHATML,
            token_columns=["score"],
        )
    with pytest.raises(ConfigError, match="must be among columns"):
        prepare_here(
            tmp_path / "raw.jsonl", chat_tokenizer, tmp_path / "e", token_columns=["score"]
        )


REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if "
    "message['role'] == 'assistant' and not loop.last %}{{ "
    "message['content'].split('</think>')[-1] }}{% else %}{{ message['content'] }}{% endif "
    "%}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)


def test_a_split_conversation_is_one_document(chat_tokenizer, tmp_path):
    """One path a reply, after what prompts for it; each target is trained in one path only."""
    thought = [{"role": "assistant", "content": f"<think>hm</think>{text}"} for text in (GOOD, BAD)]
    record = {"messages": [*ASKED, thought[0], *ASKED, thought[1]]}
    write_json_lines(tmp_path / "raw.jsonl", [record])
    options = {"template": REWRITING, "on_rewrite": "split"}
    prepare_here(tmp_path / "raw.jsonl", chat_tokenizer, tmp_path / "split", **options)
    prepare_here(
        tmp_path / "raw.jsonl", chat_tokenizer, tmp_path / "tree", answers="tree", **options
    )
    split, (tree,) = list(Dataset.open(tmp_path / "split")), Dataset.open(tmp_path / "tree")
    assert len(split) == len(tree.tree.paths) == 2
    assert len(tree.tokens) < sum(len(one.tokens) for one in split)
    for path, one in enumerate(split):
        np.testing.assert_array_equal(tree.tokens[tree.tree.slots(path)], one.tokens)
    assert tree.loss_weights.sum() == sum(one.loss_weights[1:].sum() for one in split)
    assert set(tree.loss_weights) == {0, 1}
