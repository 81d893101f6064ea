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
        num_cut=0,
        fingerprint=subject.fingerprint,
    )
    again = run_lm_eval([CHOICE, WRITE], broken, limit=5, cache=tmp_path)
    assert [(one.name, one.score) for one in again] == [(one.name, one.score) for one in first]
    broken.fingerprint = lambda: "another model"
    with pytest.raises(AttributeError, match="log_likelihoods"):
        run_lm_eval([CHOICE], broken, limit=5, cache=tmp_path)


def test_groups_have_their_tasks() -> None:
    from penstock.learn.evaluation.lm_eval_tasks import results_of

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
    with pytest.raises(ConfigError, match="lm-eval: Unknown config shape"):
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
