"""HumanEval, and HumanEval+ in both of its layouts.

HumanEval: records with `task_id`, `prompt` (a function's head and docstring), `entry_point`, `canonical_solution` (its
body) and `test` (a function `check`). HumanEval+ is either the same with a longer `test` (the hub's
evalplus/humanevalplus), or EvalPlus's own file, with `base_input`, `plus_input` and `atol` instead (see `evalplus`).

Source: Chen et al. 2021, arXiv:2107.03374; the stops are those of its section 2.
"""

from typing import Any

from penstock.evaluation.code_problems import CodeProblem, field
from penstock.evaluation.evalplus import differential_tests, humaneval_rule

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")


def humaneval_problem(record: dict[str, Any], where: str) -> CodeProblem:
    """The problem of one record of HumanEval or HumanEval+.

    Args:
        record: The record.
        where: The file, for errors.

    Raises:
        RecordError: A field is missing.
    """
    prompt, entry_point = field(record, "prompt", where), field(record, "entry_point", where)
    canonical = field(record, "canonical_solution", where)
    if "plus_input" in record:
        tests = differential_tests(record, prompt + canonical, humaneval_rule(entry_point), where)
    else:
        # Some tests call the prompt's helpers, or the function itself: these are the benchmark's own, not the model's.
        check = f"{field(record, 'test', where)}\n\ncheck(function_of_solution({entry_point!r}))\n"
        tests = f"{prompt}{canonical}\n\n{check}"

    return CodeProblem(
        name=field(record, "task_id", where),
        prompt=prompt,
        request=(
            "Complete this Python function. Reply with the whole function in one fenced block.\n\n"
            f"```python\n{prompt}```"
        ),
        entry_point=entry_point,
        given=prompt,
        stops=STOPS,
        tests=tests,
        canonical=canonical,
    )
