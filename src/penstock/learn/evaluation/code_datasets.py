"""The problems of HumanEval, MBPP and EvalPlus, read from the benchmarks' own files.

HumanEval: records have `task_id`, `prompt` (a function's head and docstring), `entry_point`,
`canonical_solution` (its body) and `test` (a function `check`). HumanEval+ is either the same with
a longer `test` (evalplus/humanevalplus on the hub), or EvalPlus's own file. Source: Chen et al.
2021, arXiv:2107.03374; the stops are those of its section 2.

MBPP: short problems in words with three tests each; the test problems are numbers 11 to 510.
Records have `task_id`, `text`, `code`, `test_list` and `test_setup_code`. As published, the prompt
shows problems 2, 3 and 4 with their solutions, then the problem with its tests; the code is the
reply up to `[DONE]`. Source: Austin et al. 2021, arXiv:2108.07732, section 3 and the README of
google-research/mbpp.

EvalPlus's own files: records have `task_id`, `prompt`, `entry_point`, `canonical_solution`,
`base_input` and `plus_input` (lists of lists of arguments: the benchmark's and those that EvalPlus
adds) and `atol`; MBPP+ also `assertion`, the base tests as statements, which the inputs repeat. The
files have no expected values: the reference computes them in the process of the tests (see
`differential`). evalplus/mbppplus on the hub has a script of tests in `test` instead, which needs
numpy. JSON has no tuples, sets and complex numbers; EvalPlus's table of which arguments of which
MBPP problem have these types (`evalplus/data/mbpp.py`, for v0.1.0 of the file) is kept here by
shape.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.core.errors import RecordError
from penstock.core.json_values import JsonObject
from penstock.learn.evaluation.code_problems import CodeProblem, called_names, calls_of, field
from penstock.learn.evaluation.recognition import converted
from penstock.learn.evaluation.records import Placed

Arguments = list[Any]

HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
EXAMPLES = (2, 3, 4)
"""MBPP problems that are shown with their solutions."""
TEST_NUMBERS = range(11, 511)
MBPP_STOPS = ("[DONE]",)
MBPP_PLUS_STOPS = ('\n"""', "\nassert", "\nprint(", "\nif __name__", "\ndef main(")

_INPUTS = ("base_input", "plus_input")
_COMPARISON = Path(__file__).with_name("differential.py").read_text(encoding="utf-8")
_SAME_SET = {
    *(
        "similar_elements",
        "find_char_long",
        "common_in_nested_lists",
        "extract_singly",
        "larg_nnum",
    ),
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
"""Entry point of an MBPP+ problem → its rule in `differential.RULES`, if that is not "same"."""


def mbpp_plus_problem(record: JsonObject, where: str) -> CodeProblem:
    """A problem of MBPP+, from its record.

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
    number = _number(field(record, "task_id", where), where)
    typed = {
        name: [_typed(number, list(given)) for given in _inputs(record, name, where)]
        for name in _INPUTS
    }
    return CodeProblem(
        name=record["task_id"],
        prompt=prompt,
        request=(
            f"Write a Python function `{entry_point}` that does this. Reply with it in one "
            f"fenced block.\n\n{prompt}"
        ),
        names=(entry_point,),
        given=prompt,
        stops=MBPP_PLUS_STOPS,
        tests=differential_tests(record | typed, prompt + canonical, rule, where),
        canonical=canonical,
    )


def _inputs(record: dict[str, object], name: str, where: str) -> list[Arguments]:
    """Lists of arguments; EvalPlus's file has `{}` where there are none."""
    found: list[Arguments] = [] if record.get(name) == {} else field(record, name, where, list)
    return found


def _number(task_id: str, where: str) -> int:
    """The number of a problem of MBPP+."""
    found = re.fullmatch(r"Mbpp/(\d+)", task_id)
    if found is None:
        raise RecordError(
            f"{where}: 'task_id' is {task_id!r:.60}; expected Mbpp/ and a number; give the "
            "file of MBPP+"
        )
    return int(found[1])


def _hub_problem(record: dict[str, object], where: str) -> CodeProblem:
    """A problem from a record of evalplus/mbppplus on the hub: words, and a script of tests with
    inputs and results.
    """
    words, tests = field(record, "prompt", where), field(record, "test", where)
    test, canonical = _tests(record, where)[0].strip(), field(record, "code", where)
    prompt = f'"""\n{words}\n{test}\n"""\n'
    names = called_names(tests, canonical, where)
    return CodeProblem(
        name=f"Mbpp/{field(record, 'task_id', where, int)}",
        prompt=prompt,
        request=(
            f"{words} Reply with the code in one fenced Python block. It should pass this "
            f"test:\n\n{test}"
        ),
        names=names,
        given=prompt,
        stops=MBPP_PLUS_STOPS,
        tests=f"{calls_of(names)}{tests}\n",
        canonical=canonical,
    )


def differential_tests(record: dict[str, object], reference: str, rule: str, where: str) -> str:
    """The program that tests code against a reference on the base and plus inputs of a record.

    Args:
        record: Has `entry_point`, `base_input`, `plus_input` and `atol`.
        reference: The code of the reference.
        rule: How answers are compared, see `differential.RULES`.
        where: The file, for errors.
    """
    inputs = [list(given) for name in _INPUTS for given in _inputs(record, name, where)]
    # A function returns them, so that each call gives new lists; JSON's infinities become names.
    made = f"def _inputs():\n    inf, nan = math.inf, math.nan\n    return {inputs!r}\n"
    function = f"function_of_solution({record['entry_point']!r})"
    last = (
        f"{record['entry_point']!r}, _inputs, {float(field(record, 'atol', where, float))!r}, "
        f"{rule!r}"
    )
    return f"{_COMPARISON}\n\n{made}\ncheck({function}, {reference!r}, {last})\n"


def _tuples(value: object) -> Any:
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
        (
            2,
            116,
            132,
            143,
            222,
            261,
            273,
            394,
            399,
            421,
            424,
            429,
            470,
            560,
            579,
            596,
            616,
            630,
            726,
            740,
            744,
            809,
        ),
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
"""MBPP problems with arguments that JSON cannot express, and the function that converts them."""
_BY_NUMBER = {number: make for numbers, make in _SHAPES for number in numbers}


def _typed(number: int, given: Arguments) -> Arguments:
    """The arguments of a problem of MBPP as Python values."""
    return _BY_NUMBER[number](given) if number in _BY_NUMBER else given


def humaneval_problem(record: dict[str, object], where: str) -> CodeProblem:
    """A problem of HumanEval or HumanEval+, from its record.

    Args:
        record: The record.
        where: The file, for errors.

    Raises:
        RecordError: A field is missing.
    """
    prompt, entry_point = field(record, "prompt", where), field(record, "entry_point", where)
    canonical = field(record, "canonical_solution", where)
    if "plus_input" in record:
        rule = "root" if entry_point == "find_zero" else "same"
        tests = differential_tests(record, prompt + canonical, rule, where)
    else:
        # Some tests call the prompt's helpers or the function itself; these are the benchmark's,
        # not the model's.
        check = f"{field(record, 'test', where)}\n\ncheck(function_of_solution({entry_point!r}))\n"
        tests = f"{prompt}{canonical}\n\n{check}"
    return CodeProblem(
        name=field(record, "task_id", where),
        prompt=prompt,
        request=(
            "Complete this Python function. Reply with the whole function in one fenced block.\n\n"
            f"```python\n{prompt}```"
        ),
        names=(entry_point,),
        given=prompt,
        stops=HUMANEVAL_STOPS,
        tests=tests,
        canonical=canonical,
    )


def mbpp_problems(
    records: Sequence[dict[str, object]], shots: int, where: str
) -> list[CodeProblem]:
    """`mbpp_problems_at` for records that are all at one place: their file."""
    return mbpp_problems_at([(where, record) for record in records], shots, where)


def mbpp_problems_at(records: Sequence[Placed], shots: int, where: str) -> list[CodeProblem]:
    """The test problems of MBPP, each prompt beginning with the examples.

    Args:
        records: All records of the file, with their places.
        shots: Number of examples, 0 to 3.
        where: The file, for errors.

    Raises:
        RecordError: A field or an example is missing, or holds something else.
    """
    by_number = {
        converted(lambda one, at: field(one, "task_id", at, int), record, place, "mbpp"): (
            place,
            record,
        )
        for place, record in records
    }
    missing = [number for number in EXAMPLES[:shots] if number not in by_number]
    if missing:
        raise RecordError(
            f"{where}: problem {missing[0]} is missing; the examples in MBPP's prompt are "
            "problems 2, 3 and 4; complete the file, or set shots to 0"
        )
    examples = "".join(
        f"{_question(record, place)}\n{_lines(field(record, 'code', place))}\n[DONE]\n\n"
        for place, record in (by_number[number] for number in EXAMPLES[:shots])
    )
    chosen = [by_number[number] for number in sorted(by_number) if number in TEST_NUMBERS]
    return [
        converted(lambda one, at: _problem(one, examples, at), record, place, "mbpp")
        for place, record in chosen
    ]


def _tests(record: dict[str, object], where: str) -> list[str]:
    """The tests of a problem, at least one."""
    tests: list[str] = field(record, "test_list", where, list)
    if not tests or not all(isinstance(one, str) for one in tests):
        raise RecordError(
            f"{where}: 'test_list' is {tests!r:.60}; expected texts; give the file of this "
            "benchmark"
        )
    return tests


def _problem(record: dict[str, object], examples: str, where: str) -> CodeProblem:
    tests = "\n".join([_lines(field(record, "test_setup_code", where)), *_tests(record, where)])
    words, asserts = field(record, "text", where), "\n".join(_tests(record, where))
    canonical = _lines(field(record, "code", where))
    names = called_names(tests, canonical, where)
    return CodeProblem(
        name=f"MBPP/{record['task_id']}",
        prompt=f"{examples}{_question(record, where)}\n",
        request=(
            f"{words} Reply with the code in one fenced Python block. It should pass these "
            f"tests:\n\n{asserts}"
        ),
        names=names,
        given="",
        stops=MBPP_STOPS,
        tests=calls_of(names) + tests,
        canonical=canonical,
    )


def _question(record: dict[str, object], where: str) -> str:
    tests = "\n".join(_tests(record, where))
    words = field(record, "text", where)
    return (
        f"You are an expert Python programmer, and here is your task: {words} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]"
    )


def _lines(text: str) -> str:
    """The text with Unix line ends, because the file has Windows ones."""
    return text.replace("\r\n", "\n").strip("\n")
