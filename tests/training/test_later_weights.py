"""Sharded models are built without weights, and each rank fills its own part: the same numbers as
of models that are loaded whole, from half of the bytes, without a whole copy on any rank.
"""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_makers import losses, make, train, values, write_run_file

import penstock as ps
from makers.models import tiny_huggingface
from makers.ranks import run_processes, run_ranks
from penstock.core.errors import ConfigError
from penstock.learn.training import memory
from penstock.learn.training.distributed import Ranks
from penstock.learn.training.metrics import read_metrics
from penstock.learn.training.settings import TrainSettings
from penstock.models import ModelSettings
from penstock.models.on_meta import all_on_meta, parameters_on_meta
from penstock.plan.loader import PlanSettings
from penstock.tokenizers import add_tokens

pytestmark = pytest.mark.usefixtures("plain_torch")

CHECKS = Path(__file__).with_name("later_weights_checks.py")
BAD = "model-00001-of-00002.safetensors"


def asked(folder, *checks):
    ended = run_ranks(CHECKS, [folder, *checks], 2, folder)
    assert [status for status, _, _ in ended] == [0, 0], "\n".join(e[-3000:] for _, _, e in ended)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def damage(path, change):
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


def without_norm(weights):
    del weights[next(name for name in sorted(weights) if "norm" in name)]


def not_a_number(weights):
    # In the second half of its rows, which only rank 1 reads.
    name = next(name for name in sorted(weights) if weights[name].ndim > 1)
    weights[name][-1, -1] = float("nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("later")
    for name, kind, more in (
        ("llama", "llama", {}),
        (
            "experts",
            "qwen3_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "head_dim": 16,
            },
        ),
    ):
        inner = tiny_huggingface(kind, vocab_size=97, **more)
        inner.save_pretrained(made / f"bad {name}", max_shard_size="60KB")
        files = sorted((made / f"bad {name}").glob("model-*"))
        assert len(files) > 1
        for fault in ("missing name", "missing file", "truncated", "left over"):
            shutil.copytree(made / f"bad {name}", at := made / f"bad {name}: {fault}")
            file = at / files[-1].name
            if fault == "missing name":
                damage(file, without_norm)
            elif fault == "missing file":
                file.unlink()
            elif fault == "truncated":
                file.write_bytes(file.read_bytes()[:-100])
            else:
                damage(file, lambda weights: weights.update({"model.more.weight": torch.ones(3)}))
        damage(files[-1], not_a_number)
        (made / f"bad {name}").rename(made / f"bad {name}: NaN")
    return made


@pytest.fixture(scope="module")
def two(folder):
    return asked(folder, "drawn", "theirs", "folders", "refused", "one_lacks_a_file")


MADE = {
    "drawn": ["tied", "untied", "experts", "recurrent", "lora"],
    "theirs": [
        "llama",
        "qwen3",
        "gemma3",
        "gemma3 with LoRA",
        "mixtral",
        "mixtral with LoRA",
        "qwen3_moe",
    ],
    "folders": ["ours", "bfloat16", "llama", "gemma3", "cut"],
}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, each in MADE.items() for n in each])
def test_weights_and_buffers_are_those_of_a_model_that_is_loaded_whole(two, kind, name):
    for rank in two:
        found = rank[kind][name]
        assert (found["names"], found["weights"], found["buffers"]) == ([], [], [])
        assert found["dtypes"] == ["float32"]
        assert found["trained"]
        assert found["output"] == 0
    assert two[0][kind][name]["digest"] == two[1][kind][name]["digest"]


def test_scaled_embeddings_have_their_scale(two):
    # inv_freq twice, and embed_scale.
    assert two[0]["theirs"]["gemma3"]["number of buffers"] >= 3


@pytest.mark.parametrize("name", MADE["theirs"])
def test_what_transformers_stores_by_other_names_is_sent_by_the_first_rank(two, name):
    way = "sent" if name.startswith(("mixtral", "qwen3_moe")) else "stored"
    assert [rank["theirs"][name]["way"] for rank in two] == [way, way]


@pytest.mark.parametrize(("kind", "name"), [("theirs", "llama"), ("theirs", "gemma3"), *[
    ("folders", name) for name in MADE["folders"]
]])  # fmt: skip
def test_each_rank_reads_its_part_of_the_files(two, kind, name):
    for rank in two:
        found = rank[kind][name]
        assert found["way"] == "stored"
        if name == "cut":
            # Both names of a tied weight are read, into one place.
            assert found["read"] <= 2 * found["own share"]
        else:
            assert found["read"] == pytest.approx(found["own share"], abs=1e-9)
        assert 0.4 < found["own share"] < 0.6


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, each in MADE.items() for n in each])
def test_no_rank_holds_more_than_its_part_and_one_weight(two, kind, name):
    for number, rank in enumerate(two):
        found = rank[kind][name]
        if found["way"] == "sent" and number == 0:
            continue
        # A weight that is drawn or sent is whole for a moment; what is read is cast in parts.
        assert found["largest"] <= 1
        # Gloo's threads let go of what was sent when the next one comes.
        assert found["most"] <= (2 if found["way"] == "sent" else 1.25)


def test_faults_are_refused_by_all_ranks_together(two):
    first, second = (rank["refused"] for rank in two)
    assert len(first) == 10
    for name in first:
        fault = name.partition(": ")[2]
        told = [one[name] for one in (first, second)]
        assert all("\n" not in one for one in told)
        kinds = ("CorruptionError", "ConfigError")
        assert all(one.startswith((*kinds, "DistributedError: rank")) for one in told), told
        assert any(one.startswith(kinds[fault == "missing file"]) for one in told), told
        files_gone = "No such file or directory"
        expected = {
            "missing name": "the files lack 1 weights",
            "left over": "the files have 1 weights",
            "NaN": "NaN or infinity in the weights",
            "missing file": files_gone,
        }.get(fault, "copy")
        assert all(expected in one for one in told), told
    # Only rank 1 reads that number.
    assert first["bad llama: NaN"].startswith("DistributedError: rank 1 failed")
    assert second["bad experts: NaN"].startswith("DistributedError: rank 0 failed")


def test_what_happens_to_one_rank_while_it_reads_is_an_error_of_all(two):
    found = [rank["one_lacks_a_file"] for rank in two]
    assert found[0] == "DistributedError: rank 1 failed: the line is gone"
    assert found[1] == "OSError: the line is gone"


# -- runs


SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    from penstock.learn.training.distributed import Ranks
    from training_makers import train

    data, folder = Path(sys.argv[1]), Path(sys.argv[2])
    said = []
    with Ranks(torch.device("cpu")) as ranks:
        for name, *options in eval(sys.argv[3]):
            for more in ({"until": 3 if name[0] == "c" else 2}, {"resume": True}):
                train(data, folder / name, "training.shard=true", *options, ranks=ranks, say=said.append, **more)
                ranks.barrier()
    print([one for one in said if one.startswith("weights:")], flush=True)
    os._exit(0)
"""  # noqa: E501
STEPS = "training.steps=4"
SHORT = ("training.steps=2", "training.schedule.warmup_steps=0")


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Runs of two ranks that were given up after step 2 and went on; and of one process."""
    folder = tmp_path_factory.mktemp("later runs")
    size = ps.open_dataset(data / "data" / "train").tokenizer.vocab_size
    for kind, more in (
        ("gemma3_text", {"head_dim": 16}),
        (
            "qwen3_moe",
            {
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
        ),
    ):
        tiny_huggingface(kind, vocab_size=size, **more).save_pretrained(folder / kind)
    train(data, folder / "before", *SHORT, "training.seed=5")
    options = {
        "new": ["training.seed=7"],
        "gemma3": [f"model=hf:{folder}/gemma3_text"],
        "experts": [f"model=hf:{folder}/qwen3_moe"],
        "from": [f"model=from:{folder}/before"],
        "frozen": ["training.frozen=[embedding.weight]"],
        "lora": ["training.lora={rank: 2}", f"model=hf:{folder}/gemma3_text"],
        "continued": [f"training.continue_from={folder}/before"],
        "lora of a run": ["training.lora={rank: 2}", f"model=from:{folder}/before"],
    }
    each = [(f"{name} of two", STEPS, *more) for name, more in options.items()]
    said = run_processes(folder / "train.py", SCRIPT, data, folder, repr(each), processes=2)
    for name, more in options.items():
        train(data, folder / f"{name} of one", STEPS, *more)
    return folder, said


RUNS = ["new", "gemma3", "experts", "from", "frozen", "lora", "lora of a run", "continued"]


@pytest.mark.parametrize("name", RUNS)
def test_runs_have_the_losses_of_one_process(runs, name):
    folder, said = runs
    due, found = (read_metrics(folder / f"{name} of {many}") for many in ("one", "two"))
    assert values(found, "step") == ([3, 4] if name == "continued" else [1, 2, 3, 4])
    np.testing.assert_allclose(values(found), values(due), rtol=2e-6)
    # None of them was held whole.
    assert [out.splitlines()[-1] for out, _ in said] == ["[]", "[]"]


def test_a_frozen_weight_stays_frozen(runs, data):
    folder, _ = runs
    kept = ps.load_model(folder / "frozen of two").state_dict()["embedding.weight"]
    first = ps.build_model(layers=2, width=16, heads=2, vocab_size=len(kept), seed=0)
    assert torch.equal(kept, first.state_dict()["embedding.weight"])


def test_a_mesh_of_one_too(data, tmp_path, monkeypatch):
    due = losses(train(data, tmp_path / "plain", STEPS))
    monkeypatch.setattr("penstock.models.building.initialise", None)
    with Ranks(torch.device("cpu")) as ranks:
        found = train(data, tmp_path / "run", STEPS, "training.shard=true", ranks=ranks)
    np.testing.assert_allclose(losses(found), due, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["training.lora={rank: 2, train_embeddings: all}"],
            "embeddings or modules are trained next to LoRA",
        ),
        (["model=from:LORA"], "its weights have LoRA, which is merged or removed first"),
        (["model=hf:TWICE"], "its files hold tied weights twice"),
        ([], ""),
    ],
)
def test_what_needs_whole_weights_says_so(data, tmp_path, options, why):
    pytest.importorskip("peft")
    size = ps.open_dataset(data / "data" / "train").tokenizer.vocab_size
    if "LORA" in str(options):
        train(data, tmp_path / "LORA", *SHORT, "training.lora={rank: 2}")
    if "TWICE" in str(options):
        tiny_huggingface("gemma3_text", vocab_size=size, head_dim=16).save_pretrained(
            tmp_path / "TWICE"
        )
        file = tmp_path / "TWICE" / "model.safetensors"
        table = "model.embed_tokens.weight"
        damage(file, lambda weights: weights.update({"lm_head.weight": weights[table].clone()}))
    names = ("LORA", "TWICE")
    for name in names:
        options = [one.replace(name, str(tmp_path / name)) for one in options]
    said = []
    with Ranks(torch.device("cpu")) as ranks:
        trainer = make(
            data, tmp_path / "run", STEPS, "training.shard=true", *options, ranks=ranks,
            say=said.append,
        )  # fmt: skip
        next(trainer.train())
    found = [one for one in said if one.startswith("weights:")]
    whole = "weights: each process holds the whole model until it is divided (training.shard): "
    assert found == ([whole + why] if why else [])


def test_a_longer_vocabulary_needs_whole_weights(data, tmp_path):
    train(data, tmp_path / "before", *SHORT)
    place = tmp_path / "longer"
    tokenizer = add_tokens(data / "tokenizer", ["[new]"], output=place / "tokenizer")
    documents = [[5, 6 + n % 40, tokenizer.vocab_size - 1, 7, 8, 9] for n in range(60)]
    ps.write_dataset(place / "data" / "train", documents, tokenizer=tokenizer)
    write_run_file(place)
    said = []
    options = [*SHORT, "training.shard=true", f"model=from:{tmp_path}/before"]
    with Ranks(torch.device("cpu")) as ranks:
        next(make(place, tmp_path / "run", *options, ranks=ranks, say=said.append).train())
    assert any("its vocabulary grows" in one for one in said)
    assert any("the new ones begin as the mean of the old ones" in one for one in said)


def test_memory_counts_the_share_of_a_rank():
    model = ModelSettings(layers=2, width=64, heads=4)
    plan = PlanSettings(sequence_length=8, rows_per_step=8)
    count = model.with_vocabulary(97).num_parameters()
    there = count * 16 // 3
    for shares, fits in ((4, True), (2, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "device_memory", lambda _: there)
            training = TrainSettings(shard=True)

            def check(training=training, shares=shares):
                memory.check_memory(
                    model, 97, training, plan, device=torch.device("cpu"), ranks=4, shares=shares
                )

            if fits:
                check()
                continue
            with pytest.raises(ConfigError, match="parameters, divided among 2 processes, need"):
                check()


# -- the parts


def test_only_parameters_of_this_thread_are_on_meta():
    found = {}

    def elsewhere():
        found["other"] = torch.nn.Linear(2, 2)

    with parameters_on_meta():
        norm = torch.nn.BatchNorm1d(3)
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    assert norm.weight.is_meta
    assert norm.weight.requires_grad
    assert torch.equal(norm.running_var, torch.ones(3))
    assert not found["other"].weight.is_meta
    assert not torch.nn.Linear(2, 2).weight.is_meta
    with all_on_meta(norm):
        assert norm(torch.empty(2, 3, device="meta")).shape == (2, 3)
    assert torch.equal(norm.running_var, torch.ones(3))
    assert norm.num_batches_tracked == 0
