"""The name that was meant by one that does not exist."""

import inspect
import pickle
from dataclasses import replace

import pytest

import penstock as ps
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
    assert (
        did_you_mean("meanweight", ["focal_loss", "MeanWeights"]) == "did you mean 'MeanWeights'?"
    )
    assert did_you_mean("zzz", OPTIONS, "check the name") == "check the name"


def test_only_unknown_names_are_refused():
    refuse_unknown(OPTIONS, OPTIONS, "an option of train")
    with pytest.raises(ConfigError, match=r"'lr' is not an option.*learning_rate"):
        refuse_unknown(["steps", "lr"], OPTIONS, "an option of train")


def _public():
    """Functions and classes that users call by keyword; `ModelInput`, `Dataset` and `Run` are made
    by others.
    """
    for name in ps.__all__:
        given = getattr(ps, name)
        made_by_others = given in (ps.ModelInput, ps.Dataset, ps.Run)
        if (
            not callable(given)
            or made_by_others
            or (isinstance(given, type) and issubclass(given, (Exception, dict)))
        ):
            continue
        yield pytest.param(given, id=name)


@pytest.mark.parametrize("call", list(_public()))
def test_every_public_call_says_which_keyword_was_meant(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parameters = inspect.signature(call).parameters.values()
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    needed = {one.name: str(tmp_path) for one in named if one.default is one.empty}
    with pytest.raises(ConfigError, match=r"'?zzz_qq'?"):
        call(**needed, zzz_qq=1)
    known = next(one.name for one in reversed(named) if len(one.name) > 3)
    with pytest.raises(ConfigError, match="did you mean"):
        call(**needed, **{f"{known}x": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_loader_knows_the_words_of_others():
    with pytest.raises(
        ConfigError,
        match=r"^Loader: .*batch_size.*rows_per_step",
    ):
        ps.Loader("data", batch_size=2)
    with pytest.raises(ConfigError, match=r"^Source: .*'epochs'.*'max_epochs'"):
        ps.Source("data", epochs=2)


def test_a_call_that_suggests_is_the_same_call():
    source = ps.Source("data", share=2.0)
    assert replace(source, share=3.0) == ps.Source("data", 3.0)
    assert pickle.loads(pickle.dumps(source)) == source
    assert "rows_per_step" in inspect.signature(ps.Loader).parameters
    with pytest.raises(TypeError, match="missing"):
        ps.Loader("data")
