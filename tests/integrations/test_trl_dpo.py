"""TRL's DPOTrainer on prepared pairs: the columns, and the loss of one batch against ours."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, make_model

pytest.importorskip("trl", reason="trl is not installed: pip install trl==1.16.0")
from trl_run import make_tokenizer

import penstock as ps
from penstock.core.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


def make_pairs(
    folder: Path, *, share: bool = True, groups: int = 6
) -> tuple[Any, list[dict[str, Any]]]:
    """A dataset of trees with 2 to 3 ranked answers, some with an untrained end; and the pairs by
    hand.
    """
    random, trees, wanted = np.random.default_rng(1), [], []
    for number in range(groups):
        prompt = random.integers(3, VOCABULARY, random.integers(2, 6)).tolist()
        common = random.integers(3, VOCABULARY, 2).tolist()
        # The first token that differs is the answer's number, so no two are equal.
        answers = [
            [*common, 10 + one, *random.integers(3, VOCABULARY, random.integers(1, 5))]
            for one in range(2 + number % 2)
        ]
        answers = [[int(token) for token in answer] for answer in answers]
        end = [7] if number % 3 == 0 else []
        paths = [[*prompt, *answer, *end] for answer in answers]
        weights = [
            [0.0] * len(prompt) + [1.0] * len(answer) + [0.0] * len(end) for answer in answers
        ]
        trees.append(
            ps.shards.build_tree(
                paths, weights, values={"rank": list(range(len(paths)))}, share=share
            )
        )
        wanted += [
            {"prompt_ids": prompt, "chosen_ids": better, "rejected_ids": worse}
            for better, worse in combinations(answers, 2)
        ]
    return write(folder, trees), wanted


def write(folder: Path, trees: list[Any]) -> Any:
    return ps.write_dataset(
        folder,
        [one.tokens for one in trees],
        trees=[one.tree for one in trees],
        vocab_size=VOCABULARY,
        spans=[
            [(i, i + 1, float(w)) for i, w in enumerate(one.loss_weights) if w] for one in trees
        ],
    )


def make_trainer(
    output: Path, pairs: Any, *, loss: dict[str, Any] | None = None, **more: Any
) -> Any:
    from trl import DPOConfig

    settings = {
        "max_length": None,
        "per_device_train_batch_size": 16,
        "save_strategy": "no",
        "beta": 0.1,
        **(loss or {}),
    }
    args = DPOConfig(
        str(output),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
        **settings,
    )
    given = {
        "model": make_model(),
        "ref_model": make_model(seed=1),
        "processing_class": make_tokenizer(),
        **more,
    }
    return ps.trl.DPOTrainer(args=args, train_dataset=pairs, **given)


def our_loss(data: Any, kind: str, smoothing: float = 0.0) -> float:
    """Mean over all pairs, by penstock's own training of trees on the same weights."""
    from penstock.learn.training.distributed import Ranks
    from penstock.learn.training.path_settings import PreferenceSettings
    from penstock.learn.training.path_training import PathTraining
    from penstock.learn.training.reference_model import Reference
    from penstock.learn.training.settings import TrainSettings
    from penstock.models.theirs.model import HuggingFaceModel

    cpu = torch.device("cpu")
    model = HuggingFaceModel(make_model().eval())
    reference = Reference("initial", HuggingFaceModel(make_model(seed=1).eval()), cpu)
    loader = ps.Loader(
        ps.Source(data, max_epochs=1),
        sequence_length=256,
        rows_per_step=2,
        requirements=model.requirements(),
        threads=0,
    )
    settings = TrainSettings(
        preference=PreferenceSettings(kind=kind, beta=0.1, label_smoothing=smoothing)
    )
    training = PathTraining(model, loader, settings, cpu, reference)
    (step,) = list(loader)
    training.begin(list(step), step, Ranks(cpu))
    return sum(float(training.loss(row)[0].detach()) for row in step)


@pytest.mark.parametrize("share", [True, False])
def test_pairs_are_those_of_the_answers(tmp_path: Path, share: bool) -> None:
    data, wanted = make_pairs(tmp_path / "pairs", share=share)
    found = ps.trl.preference_pairs(data)
    assert list(found) == wanted
    assert list(ps.trl.preference_pairs(data.path, num_documents=1)) == wanted[:1]


@pytest.mark.parametrize(
    ("theirs", "ours", "smoothing"),
    [("sigmoid", "dpo", 0.0), ("hinge", "hinge", 0.0), ("robust", "robust", 0.1)],
)
def test_loss_of_one_batch_is_ours(
    tmp_path: Path, theirs: str, ours: str, smoothing: float
) -> None:
    data, wanted = make_pairs(tmp_path / "pairs")
    trainer = make_trainer(
        tmp_path / "run",
        ps.trl.preference_pairs(data),
        loss={"loss_type": [theirs], "label_smoothing": smoothing},
    )
    with torch.no_grad():
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(wanted))])
        found = float(trainer.compute_loss(trainer.model, batch))
    assert found == pytest.approx(our_loss(data, ours, smoothing), rel=1e-5)
    assert found != pytest.approx(np.log(2), rel=1e-3)


def test_it_trains_and_resumes(tmp_path: Path) -> None:
    data, _ = make_pairs(tmp_path / "pairs", groups=12)
    pairs = ps.trl.preference_pairs(data)
    settings = {
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
    }
    settings |= {"logging_steps": 1, "learning_rate": 1e-2}
    whole = make_trainer(tmp_path / "run", pairs, loss=settings)
    whole.train()
    again = make_trainer(tmp_path / "run", pairs, loss=settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    losses = [
        [log["loss"] for log in one.state.log_history if "loss" in log] for one in (whole, again)
    ]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_cached_reference_is_used(tmp_path: Path) -> None:
    """Log-probabilities of `penstock reference` take the place of a second model, and the loss is
    the same.
    """
    from penstock.data.shards import extend_dataset
    from penstock.models.theirs.model import HuggingFaceModel
    from penstock.use.runs.reference import score_documents

    data, wanted = make_pairs(tmp_path / "pairs")
    scores = score_documents(HuggingFaceModel(make_model(seed=1).eval()), data)
    cached = extend_dataset(data, tmp_path / "cached", {"reference_log_probabilities": scores})
    pairs = ps.trl.preference_pairs(cached)
    trainer = make_trainer(
        tmp_path / "run", pairs, ref_model=None, loss={"precompute_ref_log_probs": True}
    )
    assert trainer.ref_model is None
    with torch.no_grad():
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(wanted))])
        found = float(trainer.compute_loss(trainer.model, batch))
    assert found == pytest.approx(our_loss(data, "dpo"), rel=1e-5)


def test_texts_still_go_the_way_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset

    texts = Dataset.from_list([{"prompt": "t3", "chosen": "t4", "rejected": "t5"}] * 4)
    trainer = make_trainer(tmp_path, texts)
    assert trainer.train_dataset[0]["chosen_ids"]


def test_what_pairs_do_not_express_is_refused(tmp_path: Path) -> None:
    def tree(paths: Any, weights: Any, **values: Any) -> Any:
        return ps.shards.build_tree(paths, weights, values=values)

    paths, ranks = [[3, 4, 5, 6, 7], [3, 4, 8, 6, 9]], [0, 1]
    gap = tree(paths, [[0, 0, 1, 0, 1]] * 2, rank=ranks)
    early = tree(paths, [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], rank=ranks)
    nothing = tree(paths, [[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]], rank=ranks)
    labels = tree(paths[:1], [[0, 0, 1, 1, 1]], label=[1])
    several = tree(
        [*paths, [3, 4, 8, 7]],
        [[0, 0, 1, 1, 1]] * 2 + [[0, 0, 0, 1]],
        rank=[0, 1, 1],
        answer=[0, 1, 1],
    )
    for number, (one, message) in enumerate(
        [
            (gap, "answer 0 has tokens between its trained ones that are not trained"),
            (early, "answers 0 and 1 have different prompts"),
            (nothing, "answer 1 has no trained token"),
            (labels, "has no answers of different rank"),
            (several, "an answer has several paths"),
        ]
    ):
        with pytest.raises(ConfigError, match=message):
            ps.trl.preference_pairs(write(tmp_path / str(number), [one]))


def test_pairs_longer_than_max_length_are_refused(tmp_path: Path) -> None:
    data, wanted = make_pairs(tmp_path / "pairs")
    longest = max(
        len(one["prompt_ids"]) + max(len(one["chosen_ids"]), len(one["rejected_ids"]))
        for one in wanted
    )
    with pytest.raises(ConfigError, match=rf"longest.*dataset.*{longest}"):
        make_trainer(
            tmp_path / "run", ps.trl.preference_pairs(data), loss={"max_length": longest - 1}
        )
    make_trainer(tmp_path / "run", ps.trl.preference_pairs(data), loss={"max_length": longest})
