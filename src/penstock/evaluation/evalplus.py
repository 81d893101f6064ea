"""EvalPlus's own files: inputs on which a solution must do as the reference does.

A record has `task_id`, `prompt`, `entry_point`, `canonical_solution`, `base_input` and `plus_input` (lists of lists of
arguments; the benchmark's own and those that EvalPlus adds) and `atol`; MBPP+ also `assertion`, the base tests as
statements, which the inputs repeat. Expected values are not in the files: they are what the reference gives, in the
process of the tests (see `differential`). The hub's evalplus/mbppplus has a script of tests in `test` instead, which
needs numpy.

JSON has no tuples, sets and complex numbers: which arguments of which problem of MBPP are such is a table of EvalPlus's
(`evalplus/data/mbpp.py`, for v0.1.0 of the file), kept here by shape.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.evaluation.code_problems import CodeProblem, calls_of, field

Arguments = list[Any]

_COMPARISON = Path(__file__).with_name("differential.py").read_text(encoding="utf-8")
_SAME_SET = {
    *("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum"),
    *("intersection_array", "find_dissimilar", "Diff"),
}
_RULES = {
    "are_equivalent": "anything",
    "sum_div": "or zero",
    "surface_Area": "pyramid",
    "digit_distance_nums": "digits",
    "check_str": "something",
    "text_match_three": "something",
    "text_starta_endb": "something",
    **dict.fromkeys(_SAME_SET, "set"),
}
MBPP_PLUS_STOPS = ('\n"""', "\nassert", "\nprint(", "\nif __name__", "\ndef main(")


def humaneval_rule(entry_point: str) -> str:
    """What counts as the same for a problem of HumanEval+; the tolerance is checked as it is in the file."""
    return "root" if entry_point == "find_zero" else "same"


def mbpp_plus_problem(record: dict[str, Any], where: str) -> CodeProblem:
    """The problem of one record of MBPP+.

    Args:
        record: The record.
        where: The file, for errors.

    Raises:
        RecordError: A field is missing.
    """
    if "plus_input" not in record and "test" in record:
        return _hub_problem(record, where)
    prompt, entry_point = field(record, "prompt", where), field(record, "entry_point", where)
    canonical = field(record, "canonical_solution", where)
    rule = _RULES.get(entry_point, "same")
    number = int(field(record, "task_id", where).rpartition("/")[2])
    typed = {name: [_typed(number, list(given)) for given in field(record, name, where)] for name in _INPUTS}
    return CodeProblem(
        name=record["task_id"],
        prompt=prompt,
        request=(
            f"Write a Python function `{entry_point}` that does this. Reply with it in one fenced block.\n\n{prompt}"
        ),
        entry_point=entry_point,
        given=prompt,
        stops=MBPP_PLUS_STOPS,
        tests=differential_tests(record | typed, prompt + canonical, rule, where),
        canonical=canonical,
    )


def _hub_problem(record: dict[str, Any], where: str) -> CodeProblem:
    """A record of the hub's evalplus/mbppplus: words, and a script of tests that holds inputs and results."""
    words, tests = field(record, "prompt", where), field(record, "test", where)
    test, canonical = field(record, "test_list", where)[0].strip(), field(record, "code", where)

    prompt = f'"""\n{words}\n{test}\n"""\n'
    return CodeProblem(
        name=f"Mbpp/{field(record, 'task_id', where)}",
        prompt=prompt,
        request=f"{words} Reply with the code in one fenced Python block. It should pass this test:\n\n{test}",
        entry_point=None,
        given=prompt,
        stops=MBPP_PLUS_STOPS,
        tests=f"{calls_of(tests, canonical, where)}{tests}\n",
        canonical=canonical,
    )


_INPUTS = ("base_input", "plus_input")


def differential_tests(record: dict[str, Any], reference: str, rule: str, where: str) -> str:
    """The program that tests code against a reference on the base and plus inputs of a record.

    Args:
        record: With `entry_point`, `base_input`, `plus_input` and `atol`.
        reference: The code of the reference.
        rule: What counts as the same, see `differential.RULES`.
        where: The file, for errors.
    """
    inputs = [list(given) for name in _INPUTS for given in field(record, name, where)]
    # Made by a function, so that each call gives new lists; JSON's infinities become names.
    made = f"def _inputs():\n    inf, nan = math.inf, math.nan\n    return {inputs!r}\n"
    function = f"function_of_solution({record['entry_point']!r})"
    last = f"{record['entry_point']!r}, _inputs, {float(field(record, 'atol', where))!r}, {rule!r}"
    return f"{_COMPARISON}\n\n{made}\ncheck({function}, {reference!r}, {last})\n"


def _tuples(value: Any) -> Any:
    """Lists at any depth as tuples."""
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


def _tuple_each(values: Arguments) -> Arguments:
    return [tuple(value) for value in values]


def _tuple_in_each(values: Arguments) -> Arguments:
    return [[tuple(part) for part in value] for value in values]


def _complex_pair(given: Arguments) -> Arguments:
    return [float(given[0]), complex(given[1])]


def _sets(given: Arguments) -> Arguments:
    """The lists of the first argument as sets, empty ones as dictionaries."""
    return [[set(part) if isinstance(part, list) and part else {} for part in given[0]]]


def _mixed(given: Arguments) -> Arguments:
    """The first argument as a tuple, in which lists are tuples."""
    return [tuple(tuple(part) if isinstance(part, list) else part for part in given[0])]


_SHAPES: tuple[tuple[tuple[int, ...], Callable[[Arguments], Arguments]], ...] = (
    (
        (2, 116, 132, 143, 222, 261, 273, 394, 399, 421, 424, 429, 470, 560, 579, 596, 616, 630, 726, 740, 744, 809),
        _tuple_each,
    ),
    ((63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780), _tuple_in_each),
    ((75, 413, 444, 753), lambda given: [_tuple_each(given[0]), given[1]]),
    ((106, 750), lambda given: [given[0], tuple(given[1])]),
    ((115,), _sets),
    ((124,), _complex_pair),
    ((250, 405, 446, 617, 720, 763, 808), lambda given: [tuple(given[0]), given[1]]),
    ((252,), lambda given: [complex(given[0])]),
    ((259, 401, 445), lambda given: _tuple_each(_tuple_in_each(given))),
    ((278,), _mixed),
    ((307,), lambda given: [tuple(given[0]), given[1], given[2]]),
    ((580, 615, 791), lambda given: [_tuples(value) for value in given]),
    ((722,), lambda given: [{key: tuple(value) for key, value in given[0].items()}, *given[1:]]),
)
"""Problems of MBPP with arguments that JSON cannot say, and what makes them of what it says."""
_BY_NUMBER = {number: make for numbers, make in _SHAPES for number in numbers}


def _typed(number: int, given: Arguments) -> Arguments:
    """The arguments of a problem of MBPP as Python values."""
    return _BY_NUMBER[number](given) if number in _BY_NUMBER else given
