"""`penstock export`: the folder has all that the run has, says the same, and can be trained on
from.
"""

import json

import pytest
import torch
from model_runs import SETTINGS, train_on
from safetensors.torch import load_file

from makers.tokenizers import CHATML
from penstock import train_tokenizer
from penstock.core.errors import ConfigError, FormatError, OutputError
from penstock.learn.generation import Sampling
from penstock.learn.training.metrics import read_metrics
from penstock.models.saving import load_model
from penstock.use.cli.export import run as export
from penstock.use.runs.opening import load_opened, writer_of


def test_a_chat_run_with_lora(made, tmp_path, capsys):
    folder = tmp_path / "exported"
    export(model=str(made / "chat"), output=folder, as_json=True)
    told = json.loads(capsys.readouterr().out)
    writers = [writer_of(load_opened(path, device="cpu", threads=1), 1)
               for path in (made / "chat", folder)]  # fmt: skip
    end = writers[0].tokenizer.special_tokens["<|im_end|>"]
    assert (told["step"], told["context_length"], told["chat_template"]) == (6, 64, True)
    assert end in told["stop_ids"]
    assert (
        json.loads((folder / "generation_config.json").read_bytes())["eos_token_id"]
        == told["stop_ids"]
    )
    assert json.loads((folder / "config.json").read_bytes())["max_position_embeddings"] == 64
    assert (folder / "chat_template.jinja").read_text().endswith(CHATML)
    assert load_model(made / "chat/checkpoints/step-00000006/model").lora is not None
    assert load_model(folder).lora is None
    prompt = writers[0].tokenizer.encode("the cat").tolist()
    said = [
        writer.engine.generate_all([prompt], Sampling(temperature=0, max_tokens=20))
        for writer in writers
    ]
    assert said[0] == said[1]
    assert [writer.engine.context_length for writer in writers] == [64, 64]
    assert writers[0].engine.stop_ids == writers[1].engine.stop_ids


def test_transformers_reads_the_folder(made, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export(model=str(made / "chat"), output=tmp_path)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    )
    asked = [{"role": "user", "content": "a dog"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    assert model(ids).logits.shape[1] == ids.shape[1]


def test_a_dtype_rounds_the_merged_weights_and_nothing_else(made, tmp_path, capsys):
    """LoRA is merged in float32 and rounded then; text of the folder is that of transformers."""
    from transformers import AutoModelForCausalLM

    whole, half = tmp_path / "whole", tmp_path / "half"
    export(model=str(made / "chat"), output=whole)
    capsys.readouterr()
    export(model=str(made / "chat"), output=half, dtype="bfloat16")
    assert "in bfloat16 after step 6" in capsys.readouterr().out
    weights = [load_file(folder / "model.safetensors") for folder in (whole, half)]
    assert all(torch.equal(one.bfloat16(), weights[1][name]) for name, one in weights[0].items())
    for path in whole.iterdir():
        if path.name not in ("model.safetensors", "config.json"):
            assert path.read_bytes() == (half / path.name).read_bytes(), path.name
    assert json.loads((half / "config.json").read_bytes())["dtype"] == "bfloat16"
    writer = writer_of(load_opened(half, device="cpu", threads=1), 1)
    prompt = writer.tokenizer.encode("the cat").tolist()
    said = writer.engine.generate_all([prompt], Sampling(temperature=0, max_tokens=20))[0].tokens
    theirs = AutoModelForCausalLM.from_pretrained(half)
    assert theirs.dtype == torch.bfloat16
    due = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    assert list(said) == due[0, len(prompt) :].tolist()[: len(said)]
    with pytest.raises(ConfigError, match=r"dtype must be one of .*got 'half'"):
        export(model=str(made / "chat"), output=tmp_path / "no", dtype="half")
    assert not (tmp_path / "no").exists()


def test_a_run_starts_with_the_weights_of_a_run_or_a_folder(made, tmp_path):
    """LoRA merged: the loss before the first step is that after the last, and all weights are
    trained.
    """
    export(model=str(made / "chat"), output=tmp_path / "exported")
    losses = []
    for name, start in (("a", made / "chat"), ("b", tmp_path / "exported"), ("c", made / "plain")):
        run = train_on(
            made / "chats",
            tmp_path / name,
            model=f"from:{start}",
            training={**SETTINGS, "steps": 2},
        )
        losses.append([record["loss"] for record in read_metrics(run)])
        assert load_model(run / "checkpoints/step-00000002/model").lora is None
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] < losses[2][0]
    assert losses[2][0] == pytest.approx(read_metrics(made / "chat")[0]["loss"], rel=1e-5)


def test_a_start_with_another_tokenizer_is_refused(made, tmp_path):
    (tmp_path / "other").mkdir()
    export(model=str(made / "plain"), output=tmp_path / "other")
    train_tokenizer(
        ["other words"], vocab_size=262, output=tmp_path / "other", overwrite=True, progress=False
    )
    with pytest.raises(ConfigError, match=r"'train'.*prepared.*tokenizer"):
        train_on(
            made / "text/train",
            tmp_path / "run",
            model=f"from:{tmp_path / 'other'}",
            training=SETTINGS,
        )
    assert not (tmp_path / "run").exists()


def test_what_is_there_is_not_written_over(made, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"\(notes.txt\).*folder"):
            export(model=str(made / "plain"), output=tmp_path, overwrite=overwrite)
        with pytest.raises(OutputError, match="is a file; name a folder"):
            export(model=str(made / "plain"), output=tmp_path / "notes.txt", overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_earlier_export_is_replaced_if_asked_for_and_nothing_else(made, tmp_path):
    out = tmp_path / "out"
    export(model=str(made / "chat"), output=out)
    names = sorted(path.name for path in out.iterdir())
    assert "chat_template.jinja" in names
    with pytest.raises(OutputError, match=r"earlier.*export.*overwrite"):
        export(model=str(made / "plain"), output=out)
    assert sorted(path.name for path in out.iterdir()) == names
    (out / "notes.txt").write_text("mine")
    export(model=str(made / "plain"), output=out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "chat_template.jinja").exists()
    export(model=str(made / "plain"), output=tmp_path / "new")
    same = [
        path
        for path in (tmp_path / "new").iterdir()
        if (out / path.name).read_bytes() == path.read_bytes()
    ]
    assert len(same) == len(list(out.iterdir())) - 1
    # A file of the user with the name of one to be written is kept, and so is the earlier export.
    (out / "chat_template.jinja").write_text("mine")
    with pytest.raises(OutputError, match=r"chat_template.jinja"):
        export(model=str(made / "chat"), output=out, overwrite=True)
    assert (out / "chat_template.jinja").read_text() == "mine"
    assert (out / "model.safetensors").read_bytes() == (
        tmp_path / "new" / "model.safetensors"
    ).read_bytes()
    (out / "export.json").write_text('{"files": ["../new/config.json"]}')
    with pytest.raises(OutputError, match=r"export.json: is damaged"):
        export(model=str(made / "plain"), output=out, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"\(run.yaml.*missing\).*model"):
        export(model=str(tmp_path), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_with_dropout_writes_without_it(made, tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    from penstock import load_tokenizer

    OPTForCausalLM(
        OPTConfig(
            vocab_size=340, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=64, dropout=0.5,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    load_tokenizer(made / "tokenizer").save(tmp_path)
    writer = writer_of(load_opened(tmp_path, device="cpu", threads=1), 1)
    greedy = Sampling(temperature=0, max_tokens=20, min_tokens=20)
    once, again = (writer.engine.generate_all([[40, 41, 42]], greedy) for _ in range(2))
    assert once == again
