"""The name that was meant by one that does not exist."""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.suggestions import did_you_mean, refuse_unknown

OPTIONS = ("steps", "learning_rate", "optimizer", "rows_per_step")


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ("step", "did you mean 'steps'?"),
        ("Learning-Rate", "did you mean 'learning_rate'?"),
        ("lr", "did you mean 'learning_rate'?"),
        ("batch_size", "did you mean 'rows_per_step'?"),
        ("optim", "did you mean 'optimizer'?"),
        ("zzz", "known: steps, learning_rate, optimizer, rows_per_step"),
    ],
)
def test_other_names_come_before_spelling_and_a_list_comes_last(given, end):
    assert did_you_mean(given, OPTIONS) == end


def test_names_in_capitals_and_what_is_said_where_nothing_resembles():
    assert did_you_mean("meanweight", ["focal_loss", "MeanWeights"]) == "did you mean 'MeanWeights'?"
    assert did_you_mean("zzz", OPTIONS, "check the name") == "check the name"


def test_only_unknown_names_are_refused():
    refuse_unknown(OPTIONS, OPTIONS, "an option of train")
    with pytest.raises(ConfigError, match=r"^'lr' is not an option of train; did you mean 'learning_rate'\?$"):
        refuse_unknown(["steps", "lr"], OPTIONS, "an option of train")
