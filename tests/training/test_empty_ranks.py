"""A rank without targets breaks no collective and changes no loss: every loss, copied and sharded,
against one process.

In turn rank 1, rank 0 and both are without a target in a step, in whole steps and in parts of
accumulated ones.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from empty_rank_runs import CASES, ROWS, STEPS, make_data, run_case, weights_of

from makers.ranks import run_ranks
from penstock.learn.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("plain_torch")

USUAL = ("untied", "own: early_return", "preference: dpo", "teacher: kl alone")
"""Cases of the default tests; the others are slow."""
AT_ONCE = 12
"""Cases of one start of processes, so that one that hangs or dies names few."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    make_data(folder)
    return folder


def compare(data: Path, folder: Path, names: list[str]) -> None:
    script = Path(__file__).with_name("empty_rank_runs.py")
    ended = run_ranks(script, [data, folder, *names], 2, folder)
    assert [status for status, _, _ in ended] == [0, 0], "\n".join(
        err[-3000:] for _, _, err in ended
    )
    for name in names:
        expected = run_case(name, data, folder / f"{name} alone".replace(":", ""))
        weights = weights_of(folder / f"{name} alone".replace(":", ""))
        for way in ("copied", "sharded"):
            if way == "sharded" and CASES[name].get("only") == "copied":
                continue
            run = folder / f"{name} {way}".replace(":", "")
            check(f"{name}, {way}", read_metrics(run), expected)
            found = weights_of(run)
            # A sharded run also holds the base that LoRA is next to.
            for key, weight in weights.items():
                # AdamW divides by the root of tiny gradients, so rounding of those is seen.
                torch.testing.assert_close(
                    found[key], weight, rtol=0, atol=2e-5, msg=lambda m, key=key: f"{key}: {m}"
                )


def check(where, found, expected):
    assert [one["step"] for one in found] == [one["step"] for one in expected], where
    for mine, theirs in zip(found, expected, strict=True):
        for figure in theirs:
            if "second" in figure or figure in ("mfu", "peak_memory"):
                continue
            np.testing.assert_allclose(
                mine[figure],
                theirs[figure],
                rtol=2e-4,
                atol=1e-6,
                err_msg=f"{where}, {figure} of step {mine['step']}",
            )


def test_a_rank_without_targets_is_as_one_process(data, tmp_path):
    compare(data, tmp_path, list(USUAL))


OTHERS = [name for name in CASES if name not in USUAL]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [OTHERS[at : at + AT_ONCE] for at in range(0, len(OTHERS), AT_ONCE)]
)
def test_every_loss(data, tmp_path, names):
    compare(data, tmp_path, names)


def test_a_step_without_a_target_is_said_once(data, tmp_path, capsys):
    run_case("untied", data, tmp_path / "run", progress=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "on any rank" in line]
    assert len(said) == 1
    assert said[0].startswith(
        "penstock: step 3 has no target on any rank: its loss is 0, and only momentum"
    )


def test_steps_are_what_they_say(data):
    """The pattern of targets that all cases rest on."""
    import penstock as ps

    for kind in ("documents", "answers"):
        source = ps.Source(data / kind, shuffle="none", max_epochs=1)
        needs = ps.InputRequirements(target_distances=1, loss_weights=True, trees=kind == "answers")
        steps = ps.Loader(
            source, sequence_length=32, rows_per_step=ROWS, packing="none", requirements=needs
        )
        found = [
            "".join("T" if (row.targets >= 0).any() else "U" for row in step) for step in steps
        ]
        assert found == list(STEPS)
