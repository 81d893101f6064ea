"""Runs that learn from whole answers: end to end from records, resumed exactly, evaluated, with
every reference.
"""

import math
import re

import numpy as np
import pytest
import torch
from host_reads import counted
from python_makers import KillAfter, KilledError
from test_head_casts import Casts
from training_makers import on_two_processes

import penstock as ps
from makers.datasets import prepare_here
from makers.rows import make_row
from makers.texts import make_texts, write_json_lines
from makers.tokenizers import CHAT_CONTROLS, CHATML, tiny_tokenizer
from penstock.core.errors import ConfigError, OutputError, RecordError, StateError
from penstock.learn.training import Trainer, path_training
from penstock.learn.training.path_settings import OLD_COLUMN, REFERENCE_COLUMN, TRAINER_COLUMN
from penstock.use.runs.reference import cache_reference

SETTINGS = {
    "steps": 6,
    "threads": 1,
    "learning_rate": 3e-3,
    "checkpoints": {"every": 2},
    "progress": False,
}
PREFERENCE = {"kind": "dpo", "beta": 0.5}


async def awaited(record, answer):
    return 1.0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs in which the better answer says "water", labelled answers, a held-out set, and a run to
    begin with.
    """
    folder = tmp_path_factory.mktemp("answers")
    texts = make_texts(120)
    tokenizer = tiny_tokenizer(folder / "tokenizer", texts, 340, ["<|endoftext|>", *CHAT_CONTROLS])
    pairs = [
        {"prompt": text[:30], "chosen": f"water {n % 7}", "rejected": f"pipe {n % 5}"}
        for n, text in enumerate(texts)
    ]
    labelled = [
        {
            "prompt": text[:30],
            "completion": f"{'water' if n % 2 else 'pipe'} {n % 7}",
            "label": bool(n % 2),
        }
        for n, text in enumerate(texts)
    ]
    for name, records in (("pairs", pairs[:100]), ("held", pairs[100:]), ("labels", labelled)):
        write_json_lines(folder / f"{name}.jsonl", records)
        prepare_here(
            folder / f"{name}.jsonl", tokenizer, folder / name, template=CHATML, answers="tree"
        )
    prepare_here(folder / "pairs.jsonl", tokenizer, folder / "best", template=CHATML)
    ps.train(model_for(folder), loader_for(folder / "best"), output=folder / "base", **SETTINGS)
    return folder


def model_for(folder, **more):
    vocab_size = ps.open_dataset(folder / "pairs").tokenizer.vocab_size
    return ps.build_model(layers=2, width=16, heads=2, vocab_size=vocab_size, **more)


def loader_for(path, **more):
    return ps.Loader(path, **{"sequence_length": 128, "rows_per_step": 4, "seed": 1, **more})


def start(data, output, name="pairs", model=None, **more):
    settings = {**SETTINGS, "preference": PREFERENCE, **more}
    return ps.train(
        model_for(data) if model is None else model,
        loader_for(data / name),
        output=output,
        **settings,
    )


def losses(run):
    return [record["loss"] for record in run.metrics]


def test_a_run_learns_to_prefer(data, tmp_path):
    run = start(
        data,
        tmp_path / "run",
        steps=30,
        evaluators={"held": {"kind": "preference", "data": str(data / "held"), "every": 30}},
    )
    first, last = run.metrics[0], run.metrics[-1]
    # Model and reference are the same at first.
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["preference.margin"] == pytest.approx(0, abs=1e-6)
    assert last["loss"] < 0.2
    assert last["preference.accuracy"] == 1
    assert last["held/accuracy"] > 0.9
    assert last["held/loss"] < 0.5
    assert last["held/margin"] > 0


def test_killed_and_resumed_is_the_same(data, tmp_path):
    whole = start(data, tmp_path / "whole")
    with pytest.raises(KilledError, match="after step"):
        start(data, tmp_path / "killed", on_step=KillAfter(3))
    again = start(data, tmp_path / "killed", resume=True)
    assert losses(again) == losses(whole)
    assert [one["preference.margin"] for one in again.metrics] == [
        one["preference.margin"] for one in whole.metrics
    ]


def test_another_reference_is_refused_at_a_resume(data, tmp_path):
    run = start(
        data, tmp_path / "run", steps=2, preference={**PREFERENCE, "reference": str(data / "base")}
    )
    with pytest.raises(StateError, match="the reference model is"):
        start(
            data, tmp_path / "run", resume=True, preference={**PREFERENCE, "reference": "initial"}
        )
    assert run.step == 2


def test_every_reference_gives_the_same(data, tmp_path):
    """The run's own beginning, the same weights from a folder, and their log-probabilities stored
    with the data.
    """
    found = {}
    begin = str(data / "base")
    for reference in ("initial", begin):
        preference = {**PREFERENCE, "reference": reference}
        found[reference] = losses(
            start(data, tmp_path / f"run{len(found)}", model=begin, preference=preference)
        )
    cache_reference(begin, data / "pairs", tmp_path / "cached", threads=1, progress=False)
    assert REFERENCE_COLUMN in [
        column.name for column in ps.open_dataset(tmp_path / "cached").manifest.columns
    ]
    # The name decides the order of documents.
    loader = loader_for(ps.Source(tmp_path / "cached", name="pairs"))
    run = ps.train(begin, loader, output=tmp_path / "c", preference=PREFERENCE, **SETTINGS)
    assert found[begin] == found["initial"]
    assert losses(run) == pytest.approx(found["initial"], rel=1e-5)
    with pytest.raises(ConfigError, match="has a column"):
        cache_reference(begin, tmp_path / "cached", tmp_path / "twice", threads=1, progress=False)
    with pytest.raises(OutputError, match="not empty"):
        cache_reference(begin, data / "pairs", tmp_path / "cached", threads=1, progress=False)


def test_lora_switched_off_is_the_reference(data, tmp_path):
    pytest.importorskip("peft")
    begin, lora = str(data / "base"), {"rank": 4}
    with_lora = start(data, tmp_path / "a", model=begin, lora=lora)
    frozen = start(
        data, tmp_path / "b", model=begin, lora=lora, preference={**PREFERENCE, "reference": begin}
    )
    assert losses(with_lora) == pytest.approx(losses(frozen), rel=1e-5)
    assert losses(with_lora)[0] == pytest.approx(math.log(2), rel=1e-6)


def test_kto_has_its_reference_point(data, tmp_path):
    run = start(data, tmp_path / "run", "labels", steps=20, preference={"kind": "kto", "beta": 0.5})
    first, last = run.metrics[0], run.metrics[-1]
    assert first["loss"] == pytest.approx(0.5, rel=1e-6)
    assert last["loss"] < 0.4
    assert last["preference.margin"] > 0.5
    assert any(record["preference.reference_point"] > 0 for record in run.metrics)


def test_tokens_of_compared_answers_are_not_trained_alike(data, tmp_path):
    for more in (
        {},
        {"evaluators": {"held": {"data": str(data / "held")}}, "preference": PREFERENCE},
    ):
        with pytest.raises(ConfigError, match="the worse ones too"):
            ps.train(
                model_for(data),
                loader_for(data / "pairs"),
                output=tmp_path / "run",
                **SETTINGS,
                **more,
            )
    with pytest.raises(ConfigError, match="'best' has no paths"):
        start(data, tmp_path / "run", "best")
    evaluators = {"held": {"kind": "preference", "data": str(data / "held")}}
    with pytest.raises(ConfigError, match=r"needs training\.preference"):
        ps.train(
            model_for(data),
            loader_for(data / "best"),
            output=tmp_path / "run",
            evaluators=evaluators,
            **SETTINGS,
        )
    with pytest.raises(ConfigError, match="with an evaluator of kind preference"):
        ps.train(
            model_for(data),
            loader_for(data / "pairs"),
            output=tmp_path / "run",
            evaluators={"held": {"data": str(data / "held")}},
            preference={"kind": "dpo"},
            **SETTINGS,
        )


def user(text):
    return {"role": "user", "content": text}


def judge(record, answer):
    return answer.count("e") + 2.0 * answer.count("water")


@pytest.fixture(scope="module")
def rollouts(data):
    run = ps.open_run(data / "base")
    prompts = [{"messages": [{"role": "user", "content": text[:20]}]} for text in make_texts(12)]
    return run.rollouts(
        prompts,
        judge,
        output=data / "rollouts",
        samples=4,
        max_tokens=12,
        threads=1,
        progress=False,
    )


def test_rollouts_are_groups_with_rewards(data, rollouts):
    dataset = ps.open_dataset(data / "rollouts")
    assert len(dataset) == rollouts.prompts == 12
    assert ps.shards.verify(data / "rollouts").sound
    tokenizer, rewards = dataset.loaded_tokenizer, []
    for document in dataset:
        assert len(document.tree.paths) == 4
        for path in range(4):
            text = tokenizer.decode(document.tokens[document.tree.slots(path)])
            answer = re.sub(r"<\|\w+\|>", "", text.split("<|im_start|>assistant\n")[1])
            rewards.append(document.tree.value("reward")[path])
            assert rewards[-1] == judge({}, answer)
    assert rollouts.mean_reward == pytest.approx(np.mean(rewards))
    assert len({tuple(document.tree.value("reward")) for document in dataset}) > 6


def test_seeds_and_prompts_draw_apart(data, tmp_path):
    """Also neighbours: a seed of one more, a prompt of one more."""
    answers = set()
    for seed in range(2):
        found = ps.open_run(data / "base").rollouts(
            ["water", "water"],
            judge,
            output=tmp_path / f"{seed}",
            samples=4,
            max_tokens=24,
            seed=seed,
            threads=1,
            progress=False,
        )
        for document in found.dataset:
            for path in range(4):
                answers.add(tuple(document.tokens[document.tree.slots(path)]))
    assert len(answers) == 16


def test_tools_of_a_prompt_are_shown_to_the_model(data, tmp_path):
    run = ps.open_run(data / "base")
    run.export(tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    shows = "{% for tool in tools or [] %}tool {{ tool.function.name }}{% endfor %}"
    template.write_text(shows + template.read_text(encoding="utf-8"), encoding="utf-8")
    found = ps.open_run(tmp_path / "model").rollouts(
        [{"messages": [user("a")], "tools": [{"name": "add"}]}],
        judge,
        output=tmp_path / "d",
        samples=2,
        max_tokens=4,
        threads=1,
        progress=False,
    )
    text = found.dataset.loaded_tokenizer.decode(found.dataset[0].tokens)
    assert text.startswith("tool add<|im_start|>user")


def test_the_sampler_and_training_agree_on_log_probabilities(data, rollouts):
    again = cache_reference(
        data / "base", data / "rollouts", data / "scored", threads=1, progress=False
    )
    assert rollouts.prompts
    for document in again:
        trained = document.loss_weights != 0
        ours, theirs = (document.columns[name][trained] for name in (REFERENCE_COLUMN, OLD_COLUMN))
        assert trained.any()
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_policy_learns_from_rewards(data, tmp_path, rollouts):
    loader = ps.Loader(
        ps.Source(data / "rollouts", max_epochs=8), sequence_length=256, rows_per_step=2
    )
    settings = {
        **SETTINGS,
        "steps": None,
        "learning_rate": 1e-3,
        "warmup_steps": 1,
        "schedule": "constant",
    }
    run = ps.train(
        str(data / "base"), loader, output=tmp_path / "run", policy={"clip_high": 0.3}, **settings
    )
    first = run.metrics[0]
    # One step of the policy that sampled: ratios are 1.
    assert first["policy.log_ratio"] < 1e-5
    assert first["policy.clipped"] == 0
    prompts = [{"messages": [{"role": "user", "content": text[:20]}]} for text in make_texts(12)]
    more = run.rollouts(
        prompts,
        judge,
        output=tmp_path / "more",
        samples=4,
        max_tokens=12,
        threads=1,
        progress=False,
    )
    assert more.mean_reward > rollouts.mean_reward
    assert rollouts.spread > 6


PROMPTS = [{"messages": [{"role": "user", "content": text[:20]}]} for text in make_texts(12)]


def sample(data, output, reward=judge, prompts=PROMPTS, **settings):
    given = {"samples": 4, "max_tokens": 12, "threads": 1, "progress": False, **settings}
    return ps.open_run(data / "base").rollouts(prompts, reward, output=output, **given)


def learn(data, rollouts, output, **policy):
    loader = ps.Loader(ps.Source(rollouts, max_epochs=4), sequence_length=256, rows_per_step=2)
    settings = {**SETTINGS, "steps": 2, "warmup_steps": 1}
    return ps.train(str(data / "base"), loader, output=output, policy=policy, **settings)


@pytest.mark.parametrize("temperature", [0.5, 1.6])
def test_rollouts_and_training_have_one_temperature(data, tmp_path, temperature):
    sample(data, tmp_path / "d", temperature=temperature)
    dataset = ps.open_dataset(tmp_path / "d")
    assert all((one.tree.value("temperature") == temperature).all() for one in dataset)
    model, farthest = ps.load_model(data / "base"), 0.0
    for document in dataset[:3]:
        for path in range(4):
            slots = document.tree.slots(path)
            ids, stored = (
                document.tokens[slots].astype(np.int64),
                document.columns[OLD_COLUMN][slots][1:],
            )
            with torch.no_grad():
                logits = model.logits(model(model.tensors(make_row([len(ids)], tokens=ids)))[0])[
                    :-1
                ]
            logs = [
                (logits / warm).log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
                for warm in (temperature, 1)
            ]
            gaps = [np.abs(one.numpy() - stored)[stored != 0].max() for one in logs]
            assert gaps[0] < 1e-4
            farthest = max(farthest, gaps[1])
    assert farthest > 0.01
    run = learn(data, tmp_path / "d", tmp_path / "run", kl=0.1)
    assert run.metrics[0]["policy.log_ratio"] < 1e-4
    assert run.metrics[0]["policy.kl"] < 1e-6
    # A reference that was computed before, and the trainer's own probabilities, are at that
    # temperature, too.
    cache_reference(data / "base", tmp_path / "d", tmp_path / "r", threads=1, progress=False)
    again = cache_reference(
        data / "base",
        tmp_path / "r",
        tmp_path / "t",
        column=TRAINER_COLUMN,
        threads=1,
        progress=False,
    )
    for document in again:
        trained = document.loss_weights != 0
        for name in (REFERENCE_COLUMN, TRAINER_COLUMN):
            found, expected = (document.columns[one][trained] for one in (name, OLD_COLUMN))
            np.testing.assert_allclose(found, expected, atol=1e-4)
    run = learn(
        data,
        tmp_path / "t",
        tmp_path / "cached",
        kl=0.1,
        importance_cap=2.0,
        kind="cispo",
        clip_high=3.0,
    )
    first = run.metrics[0]
    assert (
        max(first[f"policy.{name}"] for name in ("log_ratio", "sampler_gap", "capped", "clipped"))
        < 1e-4
    )
    assert first["policy.kl"] < 1e-6


def test_rollouts_store_the_version_that_sampled(data, tmp_path):
    sample(data, tmp_path / "d", prompts=PROMPTS[:4], version=3)
    for document in ps.open_dataset(tmp_path / "d"):
        assert (document.columns["policy_version"] == 3).all()
    run = learn(data, tmp_path / "d", tmp_path / "run", version=3, max_staleness=1)
    assert [one["policy.staleness.largest"] for one in run.metrics] == [0, 1]
    with pytest.raises(ConfigError, match="1 versions behind"):
        learn(data, tmp_path / "d", tmp_path / "late", version=3, max_staleness=0)
    with pytest.raises(ConfigError, match="version must be 0 or more"):
        sample(data, tmp_path / "e", prompts=PROMPTS[:4], version=-1)


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"min_tokens": 3}, {"presence_penalty": 1.0},
     {"frequency_penalty": 0.5}, {"logit_bias": {5: 1.0}}, {"top_k": 9, "temperature": 0.7}],
)  # fmt: skip
def test_filtered_answers_are_refused_or_taken_by_name(data, tmp_path, filters, capsys):
    sample(data, tmp_path / "d", prompts=PROMPTS[:4], **filters)
    named = next(name for name in filters if name != "temperature")
    with pytest.raises(ConfigError, match=rf"{named}.*policy.filtered"):
        learn(data, tmp_path / "d", tmp_path / "run")
    loader = ps.Loader(
        ps.Source(tmp_path / "d", max_epochs=1), sequence_length=256, rows_per_step=1
    )
    settings = {**SETTINGS, "steps": 1, "warmup_steps": 1, "progress": True}
    run = ps.train(
        str(data / "base"),
        loader,
        output=tmp_path / "run",
        policy={"filtered": "accept"},
        **settings,
    )
    # Those of the model at the temperature, without the filters, on both sides.
    assert run.metrics[0]["policy.log_ratio"] < 1e-4
    assert f"was sampled with {named}" in capsys.readouterr().err


def test_a_reward_is_told_why_an_answer_ended(data, tmp_path):
    told = []

    def reward(record, answer, *, finish_reason):
        told.append(finish_reason)
        return float(finish_reason == "stop")

    class Judge:
        def __call__(self, record, answer, finish_reason="unknown", more=None):
            assert more is None
            return float(finish_reason == "stop")

    for number, one in enumerate((reward, Judge())):
        found = sample(data, tmp_path / str(number), one, samples=8, max_tokens=6)
        values = np.array(
            [document.tree.values for document in ps.open_dataset(tmp_path / str(number))]
        )
        names = ps.open_dataset(tmp_path / str(number))[0].tree.names
        rewards, cut = (values[..., names.index(name)] for name in ("reward", "truncated"))
        assert (rewards == 1 - cut).all()
        assert rewards.mean() == pytest.approx(found.stopped)
        assert 0 < found.stopped < 1
    assert set(told) == {"stop", "length"}
    # An argument of one's own with a default is nobody's business.
    sample(data, tmp_path / "old", lambda record, answer, weight=2.0: weight, prompts=PROMPTS[:1])


def test_answers_that_were_cut_are_masked(data, tmp_path):
    sample(data, tmp_path / "d", lambda record, answer: float(len(answer)), max_tokens=6, samples=8)
    runs = {
        how: learn(data, tmp_path / "d", tmp_path / how, truncated=how) for how in ("train", "mask")
    }
    first = {how: run.metrics[0] for how, run in runs.items()}
    assert first["mask"]["gradient_norm"] != first["train"]["gradient_norm"]


def test_an_answer_of_nothing_but_the_end_is_an_answer(data, tmp_path):
    """With `min_tokens` 1, the first token would be drawn from other probabilities."""
    sample(data, tmp_path / "d", samples=32, max_tokens=4, temperature=4.0)
    dataset = ps.open_dataset(tmp_path / "d")
    assert dataset.manifest.sampling == {}
    stop = set(ps.open_run(data / "base").stop_ids)
    firsts = {
        int(
            one.tokens[
                (slots := one.tree.slots(path))[int(np.argmax(one.columns[OLD_COLUMN][slots] != 0))]
            ]
        )
        for one in dataset
        for path in range(32)
    }
    assert firsts & stop


def test_a_conversation_may_be_called_prompt(data, tmp_path):
    """As TRL's data have it."""
    asked = [{"role": "user", "content": "water"}]
    found = [
        sample(data, tmp_path / name, prompts=[{name: asked, "x": 1}], samples=2)
        for name in ("messages", "prompt")
    ]
    first, second = (one.dataset[0].tokens.tolist() for one in found)
    assert first == second
    assert found[1].examples[0][0] == "water"


@pytest.mark.parametrize("environment", [None, lambda messages, reply: 1.0])
def test_rounds_from_a_folder_of_transformers_keep_its_template(data, tmp_path, environment):
    folder = tmp_path / "exported"
    ps.open_run(data / "base").export(folder)
    asked = [{"messages": [{"role": "user", "content": "water"}]}]
    given = {"samples": 2, "max_tokens": 4, "threads": 1, "progress": False}
    reward = judge if environment is None else None
    found = ps.open_run(folder).rollouts(
        asked, reward, output=tmp_path / "d", environment=environment, **given
    )
    assert found.dataset.chat.template == (folder / "chat_template.jinja").read_text()
    assert found.dataset.chat.stop_ids == ps.open_run(folder).stop_ids
    run = ps.train(
        str(folder),
        ps.Loader(ps.Source(tmp_path / "d", max_epochs=4), sequence_length=256, rows_per_step=2),
        output=tmp_path / "run",
        policy={},
        **{**SETTINGS, "steps": 1, "warmup_steps": 1},
    )
    run.rollouts(asked, judge, output=tmp_path / "second", **given)
    assert ps.open_dataset(tmp_path / "second").chat.template == found.dataset.chat.template


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"samples": 1}, ConfigError, "at least 2"),
        ({"prompts": []}, RecordError, "no prompts"),
        ({"prompts": [{"text": "a"}]}, RecordError, "expected a text or messages in 'prompt'"),
        ({"prompts": [{"prompt": ["a"]}]}, RecordError, "expected a text or messages in 'prompt'"),
        ({"prompts": ["water " * 300]}, RecordError, "tokens; expected 1 to"),
        # A reward judges an answer to all that was said: no turn is left out.
        (
            {"prompts": [{"messages": [user("water " * 60), user("pipe " * 60), user("more")]}]},
            RecordError,
            "prompt 0: has .* tokens; expected 1 to",
        ),
        ({"prompts": [{"messages": [{"content": "a"}]}]}, RecordError, "message 0 has no role"),
        (
            {"prompts": [{"messages": [user("a"), {"role": "assistant", "content": "b"}]}]},
            RecordError,
            "prompt 0: its last message is the assistant's",
        ),
        ({"prompts": [[user("a")]]}, RecordError, "prompt 0: found"),
        ({"prompts": {"prompt": "a"}}, RecordError, "prompts: found"),
        ({"samples": "4"}, ConfigError, "samples must be at least 2"),
        (
            {"prompts": [{"messages": [user("a")], "tools": [{"name": "add"}]}]},
            ConfigError,
            "prompt 0: tools: the chat template writes none of them",
        ),
        ({"reward": lambda record, answer: float("nan")}, ConfigError, "expected a finite number"),
        ({"reward": lambda answer: 1.0}, ConfigError, "reward"),
        ({"reward": awaited}, ConfigError, "reward: found an async function, .*asyncio.run"),
        ({"reward": lambda answer, finish_reason: 1.0}, ConfigError, "reward"),
        ({"temperature": 0}, ConfigError, "temperature is 0"),
    ],
)
def test_bad_rollouts_are_refused(data, tmp_path, change, error, reason):
    given = {
        "prompts": ["water"],
        "reward": judge,
        "output": tmp_path / "d",
        "samples": 2,
        **change,
    }
    with pytest.raises(error, match=reason):
        ps.open_run(data / "base").rollouts(max_tokens=4, threads=1, progress=False, **given)
    assert not (tmp_path / "d").exists()


def test_the_commands(data, tmp_path, command_line):
    write_json_lines(tmp_path / "prompts.jsonl", [{"prompt": "water"}, {"prompt": "pipe"}])
    (tmp_path / "judge.py").write_text("def reward(record, answer):\n    return len(answer)\n")
    code, said, _ = command_line(
        "rollouts",
        data / "base",
        tmp_path / "prompts.jsonl",
        "--reward",
        f"{tmp_path}/judge.py:reward",
        "--output",
        tmp_path / "r",
        "--samples",
        3,
        "--max-tokens",
        5,
        "--threads",
        1,
    )
    assert code == 0
    assert "2 prompts: mean reward" in said
    code, said, _ = command_line(
        "reference", data / "base", tmp_path / "r", "--output", tmp_path / "s", "--threads", 1
    )
    assert (code, "2 documents with the column" in said) == (0, True)
    assert torch.isfinite(
        torch.tensor(ps.open_dataset(tmp_path / "s")[0].columns[REFERENCE_COLUMN])
    ).all()
    code, said, _ = command_line(
        "reference",
        data / "base",
        tmp_path / "s",
        "--output",
        tmp_path / "t",
        "--column",
        TRAINER_COLUMN,
    )
    assert (code, f"2 documents with the column {TRAINER_COLUMN}" in said) == (0, True)
    with pytest.raises(ConfigError, match="column must be one of"):
        cache_reference(data / "base", tmp_path / "s", tmp_path / "u", column="other")


RANKS = """
    import os, sys
    import penstock as ps

    folder, output = sys.argv[1:]
    vocab_size = ps.open_dataset(f"{folder}/pairs").tokenizer.vocab_size
    # Several runs in the same processes, one after the other.
    for name, kind, shard in (
        ("pairs", "dpo", False), ("pairs", "dpo", True), ("labels", "kto", False), ("rollouts", "token", False),
    ):
        loader = ps.Loader(
            f"{folder}/{name}", sequence_length=128, rows_per_step=4, seed=1, data_parallel=ps.DataParallel.from_env()
        )
        model = ps.build_model(layers=2, width=16, heads=2, vocab_size=vocab_size)
        settings = {"preference": {"kind": kind, "beta": 0.5}}
        if name == "rollouts":
            settings = {"policy": {"normalise": "token", "truncated": "mask", "dead_groups": "leave_out", "kl": 0.1}}
        ps.train(
            model, loader, output=f"{output}/{kind}-{shard}", steps=4, threads=1, learning_rate=3e-3, shard=shard,
            progress=False, **settings,
        )
    # Gloo's threads may still hold tensors, and abort an interpreter that ends (pytorch/pytorch#179291).
    os._exit(0)
"""  # noqa: E501


@pytest.mark.slow
def test_two_processes_train_what_one_does(data, tmp_path, rollouts):
    assert rollouts.spread
    on_two_processes(tmp_path / "script.py", RANKS, data, tmp_path / "two")
    for name, kind, shard in (
        ("pairs", "dpo", False),
        ("pairs", "dpo", True),
        ("labels", "kto", False),
    ):
        run = start(
            data,
            tmp_path / f"{kind}-{shard}",
            name,
            steps=4,
            preference={"kind": kind, "beta": 0.5},
        )
        two = ps.open_run(tmp_path / "two" / f"{kind}-{shard}")
        assert losses(two) == pytest.approx(losses(run), rel=1e-5)
        margins = [[one["preference.margin"] for one in each.metrics] for each in (two, run)]
        np.testing.assert_allclose(*margins, rtol=1e-3, atol=1e-5)
    policy = {"normalise": "token", "truncated": "mask", "dead_groups": "leave_out", "kl": 0.1}
    run = start(data, tmp_path / "one", "rollouts", steps=4, preference=None, policy=policy)
    two = ps.open_run(tmp_path / "two" / "token-False")
    assert losses(two) == pytest.approx(losses(run), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["pairs", "labels"])
def test_a_step_reads_from_the_device_once(name, data, tmp_path, monkeypatch):
    step, reads = Trainer._step, []

    def watched(self, *args):
        with counted(monkeypatch) as mine:
            record = step(self, *args)
        reads.append(dict(mine))
        return record

    monkeypatch.setattr(Trainer, "_step", watched)
    # As on a device that must not be asked for numbers of elements.
    monkeypatch.setattr(path_training, "COUNTS_FREELY", ())
    kinds = {"pairs": PREFERENCE, "labels": {"kind": "kto", "beta": 0.5}}
    start(data, tmp_path / "run", name, steps=3, preference=kinds[name])
    assert [sum(each.values()) for each in reads[1:]] == [1, 1], reads[1:]


def test_scores_and_gradients_share_one_cast_of_the_head(data, tmp_path, monkeypatch):
    found, loss = [], path_training.PathTraining._loss

    def watched(self, row, model):
        with Casts(model.unembedding.weight) as seen:
            result = loss(self, row, model)
        found.append(seen.count)
        return result

    monkeypatch.setattr(path_training.PathTraining, "_loss", watched)
    start(data, tmp_path / "run", model=model_for(data, tied=False), precision="bfloat16", steps=2)
    assert found == [1] * len(found)
    assert found
