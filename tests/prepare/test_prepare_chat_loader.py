"""Chats with different templates, and texts, in one mixture: what the loader trains is what
`chat.encode` says.
"""

import numpy as np
from test_prepare_chat import make_chats

from makers.texts import make_chat
from makers.tokenizers import CHATML
from penstock import Dataset, Loader, Mixture, Source, chat, prepare
from penstock.plan.inputs import EVERYTHING

PLAIN = (
    "{{ eos_token }}{% for message in messages %}{{ message['role'] + ': ' + "
    "message['content'] + '\n' }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% "
    "endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def weighted(chats):
    """Chats of which each second weighs its reply by half."""
    chats = [
        dict(record, messages=[dict(message) for message in record["messages"]]) for record in chats
    ]
    for record in chats[::2]:
        record["messages"][1]["weight"] = 0.5
    return chats


def trained_of(encoded):
    """(token before, target, weight) of every trained target of a document."""
    return [
        (int(encoded.tokens[at - 1]), int(encoded.tokens[at]), float(encoded.loss_weights[at]))
        for at in range(1, len(encoded.tokens))
        if encoded.loss_weights[at] != 0
    ]


def test_a_mixture_trains_the_targets_of_encode(tmp_path, chat_tokenizer):
    sets = {
        "chatml": (CHATML, weighted(make_chats(30)), {}),
        "plain": (PLAIN, make_chats(20), {"mask_history": True}),
    }
    due = []
    for name, (template, records, mask_settings) in sets.items():
        options = {
            "tokenizer": chat_tokenizer,
            "output": tmp_path / name,
            "processes": 1,
            "progress": False,
        }
        prepare(records, template=template, **mask_settings, **options)
        loaded = chat.load_template(template, tokenizer=chat_tokenizer)
        for record in records:
            due += trained_of(
                chat.encode(record, tokenizer=chat_tokenizer, template=loaded, **mask_settings)
            )
    prepare(
        iter([f"water wheel {n}" for n in range(10)]),
        tokenizer=chat_tokenizer,
        output=tmp_path / "text",
        processes=1,
        progress=False,
    )
    names = [*sets, "text"]
    sources = [
        Source(path=tmp_path / name, share=share, max_epochs=1)
        for name, share in zip(names, (2, 1, 1), strict=True)
    ]
    loader = Loader(Mixture(sources), sequence_length=64, rows_per_step=2, requirements=EVERYTHING)
    found = []
    for step in loader:
        for row in step:
            targets, weights = row.targets[0], row.loss_weights[0]
            from_chats = np.append(row.source_ids < 2, False)[row.document_ids]
            used = np.flatnonzero((targets >= 0) & from_chats)
            found += zip(
                row.tokens[used].tolist(),
                targets[used].tolist(),
                weights[used].tolist(),
                strict=True,
            )
    assert {weight for _, _, weight in found} == {0.5, 1.0}
    assert sorted(found) == sorted(due)


def test_bos_of_the_template_is_not_doubled(tmp_path, chat_tokenizer):
    options = {"tokenizer": chat_tokenizer, "processes": 1, "progress": False}
    prepare([make_chat("water", "wheel")], template=PLAIN, output=tmp_path / "out", **options)

    tokens = Dataset.open(tmp_path / "out")[0].tokens.tolist()
    eos = chat_tokenizer.eos_id
    assert tokens[0] == tokens[-1] == eos
    assert tokens.count(eos) == 2
