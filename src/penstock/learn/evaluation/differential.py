"""Tests a solution against a reference on given inputs, as EvalPlus does. It becomes part of
programs in the sandbox.

So it is a script that imports as little as possible. The reference runs first, in this process.
Then the solution is called in its own process, which gets the inputs and nothing else. Each gets
its own inputs, because a function may change its arguments.

Source: Liu et al. 2023, arXiv:2305.01210, and EvalPlus 0.3: `evalplus/eval/__init__.py`. As there,
`Mbpp/164` accepts any answer. Different: a tolerance used because one expected value is a float is
not kept for later inputs; NaN equals nothing, as in NumPy; the solution's time is compared with the
reference's time in the same program.
"""

import math
import time

TYPE_CHECKING = False  # as typing's, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from penstock.learn.evaluation.sandbox.calls import Function

TIMES_REFERENCE, LEAST_SECONDS = 4.0, 4.0
"""Time limit of a solution for an input: a multiple of the reference's time, and at least some
seconds.
"""
RELATIVE = 1e-7
FLOAT_TOLERANCE = 1e-6
"""Used if the problem names no tolerance and the expected value is a float or a list of floats."""


def check(
    solution: "Function",
    reference: str,
    entry_point: str,
    inputs: "Callable[[], list[list[Any]]]",
    tolerance: float,
    rule: str,
) -> None:
    """Raise unless the solution's function answers as the reference's does on all inputs.

    Args:
        solution: The solution's function, in the process of the solution.
        reference: Source of the reference.
        entry_point: The function that it defines.
        inputs: Returns a new list of lists of arguments.
        tolerance: Absolute; 0 for exact, except between floats.
        rule: How answers are compared; a key of `RULES`.
    """
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(reference, "<reference>", "exec", dont_inherit=True), scope)
    expected, seconds = [], []
    for arguments in inputs():
        begun = time.perf_counter()
        expected.append(scope[entry_point](*arguments))
        seconds.append(time.perf_counter() - begun)
    for number, arguments in enumerate(inputs()):
        found = solution.within(max(LEAST_SECONDS, TIMES_REFERENCE * seconds[number]), arguments)
        if not RULES[rule](found, expected[number], arguments, tolerance):
            raise AssertionError(
                f"input {number}: {_brief(found)}, expected {_brief(expected[number])}"
            )


def _brief(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:100]}"


def same(found: "object", expected: "object", _: "object", tolerance: float) -> bool:
    """Equal, or of the same type and within the tolerance."""
    if found == expected:
        return True
    if tolerance == 0 and _is_float(expected):
        tolerance = FLOAT_TOLERANCE
    return tolerance != 0 and type(found) is type(expected) and _close(found, expected, tolerance)


def _is_float(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(isinstance(part, float) for part in value)
    return isinstance(value, float)


def _close(found: "Any", expected: "Any", tolerance: float) -> bool:
    """Numbers within the tolerance, or lists of equal length with all items within it."""
    if isinstance(expected, list | tuple):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(_close(*pair, tolerance) for pair in pairs)
    if found == expected:
        return True
    return bool(abs(found - expected) <= tolerance + RELATIVE * abs(expected) < math.inf)


def _same_set(found: "Any", expected: "Any", _: "Any", tolerance: float) -> bool:
    return set(found) == set(expected)


def _something(found: "object", expected: "object", _: "object", tolerance: float) -> bool:
    """Equal truth values; for values that are not bool, anything but None (such as a match object)
    is true.
    """
    truths = [
        value if isinstance(value, bool) else value is not None for value in (found, expected)
    ]
    return truths[0] == truths[1]


def _or_zero(found: "object", expected: "object", arguments: "object", tolerance: float) -> bool:
    return found == 0 or same(found, expected, arguments, tolerance)


def _anything(found: "object", expected: "object", _: "object", tolerance: float) -> bool:
    return True


def _root(found: "Any", _: "Any", arguments: "Any", tolerance: float) -> bool:
    """Any zero of the polynomial with these coefficients, lowest first; it may have several."""
    return bool(
        abs(sum(factor * found**power for power, factor in enumerate(arguments[0]))) <= tolerance
    )


def _rounded_pyramid(found: "Any", expected: "Any", arguments: "Any", tolerance: float) -> bool:
    """The surface of a square pyramid from base edge and height; the reference treats the height as
    slant height.
    """
    edge, height = arguments
    slant = math.sqrt((edge / 2) ** 2 + height**2)
    return (
        same(found, expected, arguments, tolerance)
        or abs(found - round(edge**2 + 2 * edge * slant)) <= tolerance
    )


def _digit_distance(
    found: "object", expected: "object", arguments: "Any", tolerance: float
) -> bool:
    """The sum of the distances of digits at the same place, from the right; the reference counts
    from the left.
    """
    if found == expected:
        return True
    first, second = (str(number) for number in arguments)
    width = max(len(first), len(second))
    pairs = zip(first.zfill(width), second.zfill(width), strict=True)
    return bool(found == sum(abs(int(a) - int(b)) for a, b in pairs))


RULES = {
    "same": same,
    "set": _same_set,
    "something": _something,
    "or zero": _or_zero,
    "anything": _anything,
    "root": _root,
    "pyramid": _rounded_pyramid,
    "digits": _digit_distance,
}
