"""Short addresses: `penstock.objectives` is the module `penstock.plan.objectives`, never a second
copy of it.
"""

import subprocess
import sys

import pytest


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    "first", ["penstock.objectives.denoise", "penstock.plan.objectives.denoise"]
)
def test_both_names_give_one_module_whichever_comes_first(first):
    code = (
        f"import {first}\nimport penstock as ps, penstock.objectives as short, "
        "penstock.plan.objectives as full\nfrom penstock.objectives.denoise import "
        "Denoise\nprint(short is full is ps.objectives, Denoise is ps.Denoise, "
        "full.__name__, full.__spec__.name)"
    )
    assert _run(code).split() == [
        "True",
        "True",
        "penstock.plan.objectives",
        "penstock.plan.objectives",
    ]


@pytest.mark.parametrize("name", ["penstock.nothing", "penstock.objectives.nothing"])
def test_a_name_that_does_not_exist_is_the_usual_error(name):
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        __import__(name)
