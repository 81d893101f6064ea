"""An objective of one's own: in few lines, tried by the contract, packed like the built-in ones."""

import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from contracts import assert_exact_resume, assert_ranks_share_steps, trained_sum
from penstock import Causal
from penstock.core.errors import ConfigError
from penstock.plan.objectives import Written, check_objective


def example():
    """The documented one."""
    path = Path(__file__).parents[2] / "examples" / "reverse_training.py"
    spec = importlib.util.spec_from_file_location("reverse_training", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reverse_training"] = module
    spec.loader.exec_module(module)
    assert len(path.read_text().splitlines()) < 60
    return module.ReverseTraining


Reverse = partial(example(), marker=999)


@pytest.fixture
def data(tmp_path):
    numbers = np.random.default_rng(1)
    documents = [numbers.integers(3, 900, length) for length in numbers.integers(1, 90, 300)]
    return ps.write_dataset(tmp_path / "data", documents, vocab_size=1000)


def loader(data, objective, **settings):
    settings = {"sequence_length": 64, "rows_per_step": 4, "seed": 5, "threads": 0, **settings}
    return ps.Loader(ps.Source(data, objective=objective, max_epochs=2), **settings)


def test_it_keeps_the_contract():
    check_objective(Reverse())
    check_objective(Causal())


def test_its_documents_are_packed_with_targets_at_all_distances(data):
    need = ps.InputRequirements(
        target_distances=3, loss_weights=True, document_ids=True, positions=True, cu_seqlens=True
    )
    reversed_documents = 0
    for step in loader(data, Reverse(), requirements=need):
        for distance in (1, 2, 3):
            assert trained_sum(step, distance) == pytest.approx(
                step.loss_denominators[distance - 1]
            )
        for row in step:
            for begin, end in zip(row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True):
                tokens = row.tokens[begin:end]
                for distance in (1, 2, 3):
                    due = np.full(end - begin, -100)
                    if begin < row.num_tokens:
                        due[: max(end - begin - distance, 0)] = tokens[distance:]
                    assert np.array_equal(row.targets[distance - 1, begin:end], due)
                reversed_documents += tokens[0] == 999
    assert reversed_documents > 100


def test_every_token_of_an_epoch_is_in_some_row(data):
    once = ps.Loader(
        ps.Source(data, objective=Reverse(), max_epochs=1),
        sequence_length=64,
        rows_per_step=4,
        threads=0,
    )
    found = np.concatenate([row.tokens[: row.num_tokens] for step in once for row in step])
    due = np.concatenate([data[i].tokens for i in range(len(data))])
    assert np.array_equal(np.sort(found[found != 999]), np.sort(due))


def test_it_is_done_otherwise_in_each_epoch_and_alike_on_any_ranks(data):
    assert_exact_resume(lambda: loader(data, Reverse()), 6)
    assert_ranks_share_steps(lambda rank: loader(data, Reverse(), data_parallel=rank), (2, 4), 4)


def test_weights_of_the_dataset_go_with_their_tokens(tmp_path):
    documents = [list(range(10 * i, 10 * i + 6)) for i in range(40)]
    data = ps.write_dataset(tmp_path / "d", documents, spans=[[(1, 3, 0.5)]] * 40, vocab_size=1000)
    for step in loader(data, Reverse()):
        assert trained_sum(step) == pytest.approx(step.loss_denominator)
        for row in step:
            counted = row.targets[0][row.loss_weights[0] > 0]
            assert set(counted % 10) <= {1, 2}


@dataclass(frozen=True)
class Broken(example()):
    """The example with one promise broken."""

    marker: int = 999
    fault: str = ""

    def measure(self, lengths, keys):
        measured = super().measure(lengths, keys)
        match self.fault:
            case "short":
                return measured + 1
            case "neighbours":
                return measured + len(lengths) - 1
            case "floats":
                return measured * 1.0
        return measured

    def document_limit(self, sequence_length):
        return sequence_length - 1 + {"long": 1, "short": -1}.get(self.fault, 0)

    def write(self, tokens, weights, key):
        written = super().write(tokens, weights, key)
        match self.fault:
            case "in place":
                tokens[0] = 7
            case "prefix":
                return Written(tokens=written.tokens, prefix=1)
            case "weights":
                return Written(
                    tokens=written.tokens, weights=np.ones(len(written.tokens), np.float32)
                )
            case "negative":
                return Written(tokens=written.tokens - 1000, weights=written.weights)
        return written


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("short", "wrote int32 .1. tokens where it had measured 2"),
        ("neighbours", "among others"),
        ("floats", "whole number"),
        ("long", "is measured as 51[34] in rows of 512"),
        ("in place", "write changed the tokens"),
        ("prefix", "prefix of 1"),
        ("weights", "written otherwise|of its tokens count"),
        ("negative", "wrote ids outside 0"),
    ],
)
def test_broken_promises_are_found(fault, message, data):
    with pytest.raises(ConfigError, match=message):
        check_objective(Broken(fault=fault))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("short", "wrote .* where it had measured"),
        ("prefix", "wrote a prefix"),
        ("negative", "wrote ids outside"),
    ],
)
def test_the_loader_refuses_what_was_not_promised(fault, message, data):
    with pytest.raises(ConfigError, match=message):
        list(loader(data, Broken(fault=fault)))


def test_an_objective_must_say_itself(data):
    class Nameless(Broken):
        __repr__ = object.__repr__

    with pytest.raises(ConfigError, match="frozen dataclass"):
        loader(data, Nameless())
    with pytest.raises(ConfigError, match="frozen dataclass"):
        check_objective(Nameless())


def test_a_state_is_refused_with_another_objective(data):
    state = loader(data, Reverse()).state_dict()
    with pytest.raises(ps.errors.StateError, match="objective"):
        loader(data, Reverse(marker=998)).load_state_dict(state)


class Unfinished:
    """An objective of which half is there."""

    name = "unfinished"

    def measure(self, lengths, keys):
        """As they are."""
        return lengths


def test_what_an_objective_lacks_is_named(data):
    with pytest.raises(ConfigError, match=r"document_limit.*document_limit"):
        check_objective(Unfinished())
    with pytest.raises(ConfigError, match=r"got <.*Unfinished.*no document_limit"):
        ps.Source(data, objective=Unfinished())
    with pytest.raises(ConfigError, match=r"<class.*object.*class"):
        ps.Source(data, objective=Causal)
    with pytest.raises(ConfigError, match=r"'mine:Reversed'.*object"):
        ps.Source(data, objective="mine:Reversed")


def test_a_class_in_place_of_an_objective_is_refused():
    with pytest.raises(ConfigError, match=r"Causal: it is a class; give .* Causal\(…\)"):
        check_objective(Causal)
