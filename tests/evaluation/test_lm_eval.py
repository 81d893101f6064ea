"""lm-eval on one of our models against lm-eval's own model of the same weights, exported; and what
is refused.
"""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from makers.models import tiny_model
from makers.tokenizers import CHAT_CONTROLS, CHATML, tiny_tokenizer
from penstock.chat import load_template
from penstock.core.errors import ConfigError
from penstock.learn.evaluation.lm_eval_tasks import results_of
from penstock.learn.generation import Sampling
from penstock.models.exporting import export
from penstock.models.saving import load_model

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
# lm-eval and what it imports warn of their own future; what penstock warns of is still an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

LENGTH = 48
WORDS = (
    "cat",
    "dog",
    "tree",
    "house",
    "river",
    "sees",
    "likes",
    "finds",
    "near",
    "small",
    "big",
    "old",
)


def sentence(first: int, words: int) -> str:
    """Each word has one that follows it, so that little training is enough to write on; a dot comes
    after "old".
    """
    return " ".join(WORDS[(first + 5 * place) % len(WORDS)] for place in range(words)).replace(
        "old", "old."
    )


def learn_words(folder: Path, texts: list[list[int]]) -> None:
    """Some steps of an exported model, so that it writes words; of random weights greedy texts are
    broken bytes.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for text in texts:
        ids = torch.tensor([text[:LENGTH]])
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(our model, lm-eval's own of the same weights, set to put BOS first as the model was
    trained).
    """
    from lm_eval.models.huggingface import HFLM

    from penstock.learn.evaluation.lm_eval_model import LmEvalModel
    from penstock.learn.evaluation.subject import Subject

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("lm_eval")
    texts = [sentence(n, 20) for n in range(80)]
    tokenizer = tiny_tokenizer(folder / "own", texts, 300, CHAT_CONTROLS)
    template = load_template(CHATML, tokenizer=tokenizer)
    stops = (tokenizer.eos_id, tokenizer.special_tokens["<|im_end|>"])
    model = tiny_model(tokenizer.vocab_size, seed=3, init_std=0.02)
    export(
        model,
        folder / "hf",
        tokenizer=tokenizer,
        template=template,
        stop_ids=stops,
        context_length=LENGTH,
    )
    learn_words(
        folder / "hf", [[tokenizer.bos_id, *tokenizer.encode(text).tolist()] for text in texts]
    )
    subject = Subject(
        load_model(folder / "hf").eval(),
        tokenizer,
        context_length=LENGTH,
        stop_ids=stops,
        template=template,
    )
    theirs = HFLM(pretrained=str(folder / "hf"), device="cpu", batch_size=3, add_bos_token=True)
    return LmEvalModel(subject), theirs


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


PAIRS = [
    ("The cat", " sees"),
    ("The cat ", "sees"),  # The space at the end belongs to what is scored.
    ("The cat  \n", "sees the old tree"),
    ("", "dog"),
    ("", "<|bos|>dog near"),
    ("<|bos|>a river", " finds"),
    ("Größe 北京 🙂", " big"),
    ("likes " * 60, "the old house"),  # Longer than the context.
    *((sentence(n, 3 + n), f" {WORDS[n]}") for n in range(9)),
]


def test_log_likelihoods_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    ours, theirs = (
        one.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True) for one in pair
    )
    assert [found for found, _ in ours] == pytest.approx(
        [expected for expected, _ in theirs], abs=1e-4
    )
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_whole_texts_score_as_in_transformers(pair: tuple[Any, Any]) -> None:
    """In windows of the context; transformers' model is set to add no second BOS, as ours never
    does.
    """
    mine, theirs = pair
    texts = [("old tree.",), (sentence(1, 90),), ("x",)]
    ours = mine.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), disable_tqdm=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "add_bos_token", False)
        expected = theirs.loglikelihood_rolling(
            requests("loglikelihood_rolling", *texts), disable_tqdm=True
        )
    assert ours == pytest.approx(expected, abs=2e-4)
    assert ours[1] < ours[0] < 0


def test_greedy_texts_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    """One at a time, as transformers moves the positions of padded prompts by rounding."""
    stops: list[dict[str, Any]] = [
        {"until": ["."], "max_gen_toks": 12},
        {"until": ["t", "\n\n"], "max_gen_toks": 9, "do_sample": False, "temperature": 1},
        {"until": "e", "max_new_tokens": 20},
    ]
    contexts = [sentence(n, 1 + n % 7) for n in range(6)] + ["near " * 50]
    asked = [(context, stop) for context in contexts for stop in stops]
    ours, theirs = (
        one.generate_until(requests("generate_until", *asked), disable_tqdm=True) for one in pair
    )
    assert ours == theirs
    assert len({*ours}) > 9


def test_a_chat_is_rendered_as_by_transformers(pair: tuple[Any, Any]) -> None:
    chat = [
        {"role": "user", "content": "Is it near?"},
        {"role": "assistant", "content": "The answer is"},
    ]
    ours, theirs = pair
    for messages, opens in ((chat[:1], True), (chat, False), (chat, True)):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=opens)
        assert ours.apply_chat_template(messages, add_generation_prompt=opens) == expected
    text = ours.apply_chat_template(chat[:1])
    assert ours.tok_encode(text) == theirs.tok_encode(text, add_special_tokens=False)
    assert ours.tok_encode("Is it?")[0] == ours.subject.tokenizer.bos_id
    assert ours.chat_template(True) == CHATML
    assert ours.chat_template(False) is None


def test_a_model_without_template_has_no_chats(pair: tuple[Any, Any]) -> None:
    from penstock.learn.evaluation.lm_eval_model import LmEvalModel
    from penstock.learn.evaluation.subject import Subject

    known = pair[0].subject
    plain = LmEvalModel(Subject(known.model, known.tokenizer, context_length=LENGTH))
    with pytest.raises(ConfigError, match="no chat template"):
        plain.apply_chat_template([{"role": "user", "content": "hi"}])


def test_repeats_of_a_request_are_drawn_each_for_itself(pair: tuple[Any, Any]) -> None:
    ours = pair[0]
    asked = [("cat", {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0})] * 5
    texts = ours.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert len({*texts}) > 3
    assert ours.generate_until(requests("generate_until", *asked), disable_tqdm=True) == texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.learn.evaluation.lm_eval_model.WRITTEN_AT_ONCE", 1)
        assert (
            len({*ours.generate_until(requests("generate_until", *asked), disable_tqdm=True)}) > 3
        )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Sampling(temperature=0, max_tokens=256)),
        ({"until": "\n"}, Sampling(temperature=0, max_tokens=256, stop=("\n",))),
        (
            {"until": ["", "a", "a"], "max_gen_toks": 3},
            Sampling(temperature=0, max_tokens=3, stop=("a",)),
        ),
        ({"do_sample": False, "temperature": 1}, Sampling(temperature=0)),
        ({"temperature": 0.5, "top_p": 0.9}, Sampling(temperature=0.5, top_p=0.9)),
        ({"do_sample": True, "top_k": 0, "max_tokens": 7}, Sampling(temperature=1, max_tokens=7)),
        ({"num_beams": 1, "repetition_penalty": 1.0}, Sampling(temperature=0)),
    ],
)
def test_settings_of_generation(settings: dict[str, Any], expected: Sampling) -> None:
    from penstock.learn.evaluation.lm_eval_model import sampling_of

    assert sampling_of(settings) == expected


def test_repeats_are_drawn_each_for_itself_with_a_cache_too(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    """Though the task says no `do_sample`, without which lm-eval takes texts for greedy."""
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    drawn = {
        **WRITE,
        "repeats": 3,
        "generation_kwargs": {"until": ["."], "max_gen_toks": 6, "temperature": 1.0},
        "filter_list": [{"name": "all", "filter": [{"function": "take_first_k", "k": 3}]}],
        "process_results": lambda _, texts: seen.append([*texts[0]]) or {"n": 1.0},
        "metric_list": [{"metric": "n", "aggregation": "mean", "higher_is_better": True}],
    }
    found = []
    for seed, cache in ((0, None), (0, tmp_path), (0, tmp_path), (1, tmp_path)):
        seen: list[list[str]] = []
        run_lm_eval([drawn], pair[0].subject, limit=2, seed=seed, cache=cache)
        found.append(seen)
    assert found[0] == found[1] == found[2] != found[3]
    assert all(len({*texts}) == 3 for texts in found[0])


def test_settings_given_besides_a_task_are_used(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval
    from penstock.learn.evaluation.subject import Subject

    asked = []
    write = Subject.write
    monkeypatch.setattr(
        Subject,
        "write",
        lambda self, prompts, sampling, **more: (
            asked.append(sampling) or write(self, prompts, sampling, **more)
        ),
    )
    subject = pair[0].subject
    run_lm_eval([WRITE, CHOICE], subject, limit=2, temperature=0.7, max_tokens=3)
    run_lm_eval([WRITE], subject, limit=2)
    assert [(one.temperature, one.max_tokens) for one in asked] == [(0.7, 3), (0.0, 6)]
    with pytest.raises(ConfigError, match=r"own_choice: scores given texts.*max_tokens"):
        run_lm_eval([CHOICE], subject, max_tokens=3)


def test_shots_that_a_task_fixes_are_noted(pair: tuple[Any, Any]) -> None:
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    fixed, own = {**CHOICE, "task": "fixed", "num_fewshot": 0}, CHOICE
    found = run_lm_eval([fixed, own], pair[0].subject, limit=2, shots=1)
    assert {one.notes for one in found} == {
        ("fixed fixes 0 solved problems; shots 1 has no effect",)
    }


def test_a_control_token_of_the_task_ends_a_text(pair: tuple[Any, Any]) -> None:
    """One that is none of the model's own stops; what transformers' model writes is the same."""
    from penstock.learn.evaluation.lm_eval_model import LmEvalModel
    from penstock.learn.evaluation.subject import Subject

    known, theirs = pair[0].subject, pair[1]
    ours = LmEvalModel(
        Subject(
            known.model, known.tokenizer, context_length=LENGTH, stop_ids=(known.tokenizer.eos_id,)
        )
    )
    ids, end = ours.tok_encode("cat near"), known.tokenizer.special_tokens["<|im_end|>"]
    likeliest = int(theirs.model(torch.tensor([ids])).logits[0, -1].argmax())
    asked = [("cat near", {"until": ["<|im_end|>", "Q:"], "max_gen_toks": 5})]
    (before,) = ours.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    assert before
    with torch.no_grad():
        for model in (known.model, theirs.model):
            weights = next(one for one in model.parameters() if one.shape[0] > end)
            kept = weights[end].clone()
            weights[end] = 2 * weights[likeliest]
            try:
                one = ours if model is known.model else theirs
                found = one.generate_until(requests("generate_until", *asked), disable_tqdm=True)
            finally:
                weights[end] = kept
            assert found == [""]
    assert ours.generate_until(requests("generate_until", *asked), disable_tqdm=True) == [before]


def test_unknown_settings_of_generation_are_refused() -> None:
    from penstock.learn.evaluation.lm_eval_model import sampling_of

    with pytest.raises(ConfigError, match=r"\{'num_beams'.*4\}.*supported"):
        sampling_of({"num_beams": 4})


def test_a_tokenizer_without_bos_and_eos_needs_a_context() -> None:
    from penstock.learn.evaluation.lm_eval_model import LmEvalModel

    bare = SimpleNamespace(name="bare", bos_id=None, eos_id=None, special_tokens={})
    model = LmEvalModel(
        SimpleNamespace(
            tokenizer=bare, begin_ids=(), stop_ids=(), context_length=LENGTH, template=None
        )
    )
    with pytest.raises(ConfigError, match="neither BOS nor EOS"):
        _ = model.prefix_token_id


def word_questions(**_: Any) -> Any:
    import datasets

    rows = [
        {
            "text": f"the {word}",
            "choices": [f" {other}" for other in WORDS[:4]],
            "answer": (number + 5) % 4,
        }
        for number, word in enumerate(WORDS)
    ]
    return {"test": datasets.Dataset.from_list(rows), "dev": datasets.Dataset.from_list(rows[:2])}


COMMON = {
    "custom_dataset": word_questions,
    "test_split": "test",
    "fewshot_split": "dev",
    "fewshot_config": {"sampler": "first_n"},
}
CHOICE = {
    **COMMON,
    "task": "own_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}} ",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "num_fewshot": 2,
}
WRITE = {
    **COMMON,
    "task": "own_writing",
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 6},
    "filter_list": [
        {"name": "first", "filter": [{"function": "regex", "regex_pattern": "( [a-z]+)"}]}
    ],
}
WHOLE = {
    **COMMON,
    "task": "own_text",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "byte_perplexity"}],
}


def test_a_task_gives_what_it_gives_with_transformers(pair: tuple[Any, Any]) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    ours, theirs = pair
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    tasks = [CHOICE, WRITE]
    found = {one.name: one for one in run_lm_eval(tasks, ours.subject, limit=10)}
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[:2]
    assert torch.equal(torch.get_rng_state(), state[2])
    expected = lm_eval.simple_evaluate(
        model=theirs,
        tasks=tasks,
        limit=10,
        task_manager=TaskManager(include_defaults=False),
        log_samples=False,
    )["results"]
    assert {name: one.count for name, one in found.items()} == dict.fromkeys(found, 10)
    for name, task, metric in (
        ("lm-eval:own_choice acc", "own_choice", "acc,none"),
        ("lm-eval:own_choice acc_norm", "own_choice", "acc_norm,none"),
        ("lm-eval:own_writing exact_match (first)", "own_writing", "exact_match,first"),
    ):
        assert found[name].score == expected[task][metric]
        measure, _, chosen = metric.partition(",")
        assert found[name].standard_error == pytest.approx(
            expected[task][f"{measure}_stderr,{chosen}"]
        )
    assert 0 < found["lm-eval:own_choice acc"].score < 1


def test_whole_texts_are_a_task_too(pair: tuple[Any, Any]) -> None:
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    ours = pair[0]
    (found,) = run_lm_eval([WHOLE], ours.subject)
    texts = [row["text"] for row in word_questions()["test"]]
    scores = ours.loglikelihood_rolling(
        requests("loglikelihood_rolling", *((text,) for text in texts)), True
    )
    assert found.score == pytest.approx(
        math.exp(-sum(scores) / sum(len(text.encode()) for text in texts))
    )
    assert (found.name, found.count) == ("lm-eval:own_text byte_perplexity", len(WORDS))


def test_answers_are_taken_up(pair: tuple[Any, Any], tmp_path: Path) -> None:
    """From the file of a run that got as far."""
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    subject = pair[0].subject
    first = run_lm_eval([CHOICE, WRITE], subject, limit=5, cache=tmp_path)
    broken = SimpleNamespace(
        **{
            name: getattr(subject, name)
            for name in ("model", "tokenizer", "context_length", "stop_ids", "template")
        },
        begin_ids=subject.begin_ids,
        notes=(),
        num_cut=0,
        fingerprint=subject.fingerprint,
    )
    again = run_lm_eval([CHOICE, WRITE], broken, limit=5, cache=tmp_path)
    assert [(one.name, one.score) for one in again] == [(one.name, one.score) for one in first]
    broken.fingerprint = lambda: "another model"
    with pytest.raises(ConfigError, match=r"own_choice: AttributeError.*log_likelihoods"):
        run_lm_eval([CHOICE], broken, limit=5, cache=tmp_path)


def test_groups_have_their_tasks() -> None:
    found = {
        "results": {
            "a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 4},
            "b": {
                "alias": "b",
                "acc,none": 0.75,
                "acc_stderr,none": 0.2,
                "f1,none": 0.3,
                "f1_stderr,none": "N/A",
            },
            "alone": {
                "alias": "alone",
                "exact_match,strict": 0.2,
                "exact_match_stderr,strict": "N/A",
            },
            "both": {"alias": "both", "acc,none": 0.6, "acc_stderr,none": 0.05},
        },
        "groups": {"both": {"alias": "both", "acc,none": 0.6, "acc_stderr,none": 0.05}},
        "group_subtasks": {"both": ["a", "b"], "alone": []},
        "n-samples": {
            name: {"original": 9, "effective": n} for name, n in (("a", 4), ("b", 5), ("alone", 3))
        },
    }
    alone, both = sorted(results_of(found, 2.0, 3), key=lambda one: one.name)
    assert (both.name, both.score, both.standard_error, both.count) == (
        "lm-eval:both acc",
        0.6,
        0.05,
        9,
    )
    assert dict(both.groups) == {"a": (0.5, 0.1, 4), "b": (0.75, 0.2, 5)}
    assert (alone.name, alone.score, alone.count) == ("lm-eval:alone exact_match (strict)", 0.2, 3)
    assert math.isnan(alone.standard_error)


def test_what_lm_eval_refuses_is_told(pair: tuple[Any, Any]) -> None:
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    subject = pair[0].subject
    with pytest.raises(ConfigError, match=r"task without a name: .*Unknown config shape"):
        run_lm_eval([{"output_type": "generate_until"}], subject)
    with pytest.raises(ConfigError, match=r"own_writing.*unsafe.*in"):
        run_lm_eval([{**WRITE, "unsafe_code": True}], subject)
    with pytest.raises(ConfigError, match="'num_beams': 4"):
        run_lm_eval([{**WRITE, "generation_kwargs": {"until": ["."], "num_beams": 4}}], subject)


def test_data_that_the_hub_does_not_give_are_an_error_with_its_cure(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval

    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    def unreachable(**_: Any) -> None:
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub")

    monkeypatch.setattr(lm_eval, "simple_evaluate", unreachable)
    with pytest.raises(ConfigError, match=r"'allenai/ai2_arc'.*come"):
        run_lm_eval([CHOICE], pair[0].subject)


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
)


def test_a_system_message_that_the_template_refuses_is_left_out_and_noted(
    pair: tuple[Any, Any],
) -> None:
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval
    from penstock.learn.evaluation.subject import Subject

    known = pair[0].subject
    subject = Subject(
        known.model, known.tokenizer, context_length=LENGTH, stop_ids=known.stop_ids,
        template=load_template(NO_SYSTEM, tokenizer=known.tokenizer),
    )  # fmt: skip
    plain = {**CHOICE, "num_fewshot": 0}
    described = {**plain, "description": "Pick one.\n\n"}
    first, *_ = run_lm_eval([described], subject, limit=3, chat=True)
    due, *_ = run_lm_eval([plain], subject, limit=3, chat=True)
    assert first.notes == ("the chat template refuses a system message, so it was left out",)
    assert (first.score, due.notes) == (due.score, ())


def needs_a_package(**_: Any) -> None:
    raise ModuleNotFoundError("No module named 'langdetect'", name="langdetect")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({**CHOICE, "doc_to_texxt": "x"}, "TypeError: .*doc_to_texxt"),
        ({**CHOICE, "doc_to_text": "{{nothing.here}}"}, "UndefinedError: 'nothing'"),
        ({**CHOICE, "doc_to_text": "{{text"}, "TemplateSyntaxError: "),
        ({**CHOICE, "test_split": "nosplit"}, "KeyError: nosplit; check .*file"),
        ({**CHOICE, "num_fewshot": 50}, "AssertionError: .*2 that are available.*shots"),
        ({**CHOICE, "doc_to_choice": ["", "a", "b", "c"]}, "IndexError: "),
        ({**CHOICE, "metric_list": [{"metric": "accuracyy"}]}, "KeyError: a metric has no known"),
        (
            {**CHOICE, "metric_list": [{"metric": "acc", "aggregation": "meann"}]},
            "the aggregation of metric acc is not one of lm-eval's",
        ),
        (
            {
                **WRITE,
                "filter_list": [
                    {"name": "x", "filter": [{"function": "regex", "regex_pattern": "(("}]}
                ],
            },
            "error: missing \\)",
        ),
        (
            {**CHOICE, "custom_dataset": needs_a_package},
            "ModuleNotFoundError: .*pip install langdetect",
        ),
    ],
)
def test_mistakes_in_tasks_are_told_with_the_task(
    pair: tuple[Any, Any], task: dict[str, Any], message: str
) -> None:
    from penstock.learn.evaluation.lm_eval_tasks import run_lm_eval

    with pytest.raises(ConfigError, match=f"{task['task']}: {message}"):
        run_lm_eval([task], pair[0].subject, limit=2)


def test_files_of_tasks_that_are_damaged_or_missing(pair: tuple[Any, Any], tmp_path: Path) -> None:
    from penstock.learn.evaluation.lm_eval_tasks import LmEvalTasks

    bad = tmp_path / "bad.yaml"
    bad.write_text("task: bad\n  foo: [\n")
    with pytest.raises(ConfigError, match=r"bad.yaml: ScannerError"):
        LmEvalTasks([str(bad)], folder=tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere: there is no such folder"):
        LmEvalTasks(["bad"], folder=tmp_path / "nowhere")


def test_groups_have_the_tasks_of_groups_without_a_score() -> None:
    one = {"acc,none": 0.5, "acc_stderr,none": 0.1}
    found = {
        "results": {"a": one, "b": one, "c": one, "inner": {"alias": "inner"}, "outer": one},
        "groups": {"outer": one},
        "group_subtasks": {"outer": ["inner", "c"], "inner": ["a", "b"]},
        "n-samples": {name: {"original": 9, "effective": 3} for name in "abc"},
    }
    (outer,) = results_of(found, 1.0, 0)
    assert [*outer.groups] == ["a", "b", "c"]
    assert outer.count == 9
