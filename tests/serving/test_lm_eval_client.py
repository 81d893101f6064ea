"""lm-eval's model `local-completions`, which asks a server, against the same model without one."""

from typing import Any

import pytest
import torch
from serving_makers import running

from makers.models import tiny_model
from makers.tokenizers import tiny_tokenizer
from penstock.learn.generation import Engine
from penstock.models.exporting import export
from penstock.use.serving import ServedModel

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
# lm-eval and what it imports warn of their own future; what penstock warns of is still an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

LENGTH = 64
# The client's tokenizer puts no BOS before a text, which a server of ids cannot know.
PAIRS = [
    ("<|bos|>The cat", " sees"),
    ("<|bos|>The cat ", "sees the old tree"),
    ("<|bos|>Größe 北京 🙂", " big"),
    *((f"<|bos|>{word} the", " river") for word in ("dog", "old", "house", "tree")),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(lm-eval's client of our server, our model in lm-eval)."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from penstock.learn.evaluation.lm_eval_model import LmEvalModel
    from penstock.learn.evaluation.subject import Subject

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("lm_eval")
    tokenizer = tiny_tokenizer(
        folder / "own", ["the old cat sees the small tree near the river"], 290
    )
    model = tiny_model(tokenizer.vocab_size, seed=3, init_std=0.1).eval()
    stops = (tokenizer.eos_id,)
    export(model, folder / "hf", tokenizer=tokenizer, stop_ids=stops, context_length=LENGTH)
    engine = Engine(model, tokenizer, context_length=LENGTH, stop_ids=stops, slots=4)
    served = ServedModel(
        name="tiny", engine=engine, tokenizer=tokenizer, template=None, context_length=LENGTH
    )
    with running(served) as server:
        client = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions", model="tiny", tokenizer=str(folder / "hf"),
            tokenizer_backend="huggingface", max_length=LENGTH, batch_size=3, max_retries=1,
        )  # fmt: skip
        # lm-eval leaves room for the token that it lets a server write.
        yield (
            client,
            LmEvalModel(Subject(model, tokenizer, context_length=LENGTH - 1, stop_ids=stops)),
        )


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def test_log_likelihoods_are_those_of_the_model(pair: Any) -> None:
    theirs, ours = (
        one.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True) for one in pair
    )
    assert [found for found, _ in theirs] == pytest.approx(
        [expected for expected, _ in ours], abs=1e-4
    )
    assert [greedy for _, greedy in theirs] == [greedy for _, greedy in ours]
    assert len({round(found, 3) for found, _ in theirs}) == len(PAIRS)


def test_a_text_longer_than_the_context_is_cut_by_the_client(pair: Any) -> None:
    client, ours = pair
    subject = ours.subject
    engine = Engine(subject.model, subject.tokenizer, context_length=LENGTH)
    [(found, _)] = client.loglikelihood(
        requests("loglikelihood", ("likes " * 60, "the old house")), disable_tqdm=True
    )
    ids, due = (
        subject.tokenizer.encode(text).tolist()
        for text in ("likes" + " likes" * 59, " the old house")
    )
    assert found == pytest.approx(
        sum(x.token for x in engine.score([*ids, *due][1 - LENGTH :], 0)[-len(due) :])
    )


def test_texts_are_those_of_the_model(pair: Any) -> None:
    asked = [(context, {"until": ["e"], "max_gen_toks": 9}) for context, _ in PAIRS[:3]]
    theirs, ours = (
        one.generate_until(requests("generate_until", *asked), disable_tqdm=True) for one in pair
    )
    assert theirs == ours
    assert any(theirs)
