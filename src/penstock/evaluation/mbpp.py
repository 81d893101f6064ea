"""MBPP: short problems in words, with three tests each; the test problems are numbers 11 to 510.

Records have `task_id`, `text`, `code`, `test_list` and `test_setup_code`. The prompt shows problems 2, 3 and 4 with
their solutions, then the problem with its tests, as published; the code is what comes before `[DONE]`.

Source: Austin et al. 2021, arXiv:2108.07732, section 3 and the README of google-research/mbpp.
"""

from collections.abc import Sequence
from typing import Any

from penstock.errors import RecordError
from penstock.evaluation.code_problems import CodeProblem, calls_of, field

EXAMPLES = (2, 3, 4)
TEST_NUMBERS = range(11, 511)
STOPS = ("[DONE]",)


def mbpp_problems(records: Sequence[dict[str, Any]], shots: int, where: str) -> list[CodeProblem]:
    """The test problems, each with the examples before it.

    Args:
        records: All records of the file.
        shots: How many examples, 0 to 3.
        where: The file, for errors.

    Raises:
        RecordError: A field or an example is missing.
    """
    by_number = {int(field(record, "task_id", where)): record for record in records}
    missing = [number for number in EXAMPLES[:shots] if number not in by_number]
    if missing:
        raise RecordError(
            f"{where}: problem {missing[0]} is missing; the examples of MBPP's prompt are problems 2, 3 and 4"
        )
    examples = "".join(
        f"{_question(by_number[number], where)}\n{_lines(field(by_number[number], 'code', where))}\n[DONE]\n\n"
        for number in EXAMPLES[:shots]
    )
    return [_problem(by_number[number], examples, where) for number in sorted(by_number) if number in TEST_NUMBERS]


def _problem(record: dict[str, Any], examples: str, where: str) -> CodeProblem:
    tests = "\n".join([_lines(field(record, "test_setup_code", where)), *field(record, "test_list", where)])
    words, asserts = field(record, "text", where), "\n".join(record["test_list"])
    canonical = _lines(field(record, "code", where))

    return CodeProblem(
        name=f"MBPP/{record['task_id']}",
        prompt=f"{examples}{_question(record, where)}\n",
        request=f"{words} Reply with the code in one fenced Python block. It should pass these tests:\n\n{asserts}",
        entry_point=None,
        given="",
        stops=STOPS,
        tests=calls_of(tests, canonical, where) + tests,
        canonical=canonical,
    )


def _question(record: dict[str, Any], where: str) -> str:
    tests = "\n".join(field(record, "test_list", where))
    words = field(record, "text", where)
    return (
        f"You are an expert Python programmer, and here is your task: {words} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]"
    )


def _lines(text: str) -> str:
    """The file has Windows line ends."""
    return text.replace("\r\n", "\n").strip("\n")
