"""Character splits through the loader: a document's EOS follows its middle, and the padding comes
last.
"""

import json

import numpy as np

import penstock as ps
from makers.tokenizers import tiny_tokenizer

TEXT = "the pump flows into the turbine, and the water leaves the gate behind it. "


def test_the_end_of_a_document_is_learned_right_after_its_middle(tmp_path):
    names = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
    tokenizer = tiny_tokenizer(tmp_path / "tok", [TEXT] * 9, 330, names)
    lines = [json.dumps({"text": TEXT[place:] + TEXT[:place]}) for place in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    ps.prepare(
        str(tmp_path / "a.jsonl"),
        tokenizer=str(tmp_path / "tok"),
        output=str(tmp_path / "data"),
        progress=False,
    )
    source = ps.Source(
        str(tmp_path / "data"), objective=ps.Infill(rate=1, split="character"), max_epochs=1
    )
    pad, eos, padded = tokenizer.special_tokens["<fim_pad>"], tokenizer.eos_id, 0
    for step in ps.Loader(ps.Mixture([source]), sequence_length=256, rows_per_step=1, seed=3):
        row = step[0]
        for begin, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
            if end > row.num_tokens:
                continue
            tokens, targets = row.tokens[begin:end], row.targets[0][begin:end]
            place = int(np.argmax(tokens == eos))
            assert (tokens[place + 1 :] == pad).all()
            assert tokens[place - 1] != pad
            assert targets[place - 1] == eos
            assert (targets[place:] == -100).all()
            padded += len(tokens) - place - 1
    assert padded > 0
