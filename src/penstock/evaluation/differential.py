"""Tests a solution against a reference on given inputs, as EvalPlus does. It becomes part of programs in the sandbox.

So it is a script of its own and imports no more than it must. The reference runs first, in this process; then the
solution is asked, in its own, which is given the inputs and nothing else. Each has inputs of its own, because a
function may change what it is given.

Source: Liu et al. 2023, arXiv:2305.01210, and EvalPlus 0.3: `evalplus/eval/__init__.py`. As there, `Mbpp/164` takes
any answer. Different: a tolerance used because one expected value is a float is not kept for later inputs; NaN is equal
to nothing, as in NumPy; the reference's time, which the solution's is held against, is that of the same program.
"""

import math
import time

TYPE_CHECKING = False  # as typing's, which costs milliseconds to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from penstock.evaluation.sandbox.calls import Function

TIMES_REFERENCE, LEAST_SECONDS = 4.0, 4.0
"""A solution may take so many times as long as the reference for an input, and at least so long."""
RELATIVE = 1e-7
FLOAT_TOLERANCE = 1e-6
"""Where the problem names no tolerance, and the expected value is a float or a list of floats."""


def check(
    solution: "Function",
    reference: str,
    entry_point: str,
    inputs: "Callable[[], list[list[Any]]]",
    tolerance: float,
    rule: str,
) -> None:
    """Raise unless the solution's function does as the reference's on all inputs.

    Args:
        solution: The solution's function, in the process of the solution.
        reference: Source of the reference.
        entry_point: The function that it defines.
        inputs: A function that makes the list of lists of arguments again.
        tolerance: Absolute; 0 for exact, except between floats.
        rule: What counts as the same; a key of `RULES`.
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
            raise AssertionError(f"input {number}: {_brief(found)}, expected {_brief(expected[number])}")


def _brief(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:100]}"


def same(found: "Any", expected: "Any", _: "Any", tolerance: float) -> bool:
    """Equal, or of one type and within the tolerance."""
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
    """Numbers within the tolerance; lists of one length whose parts are."""
    if isinstance(expected, list | tuple):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(_close(*pair, tolerance) for pair in pairs)
    if found == expected:
        return True
    return bool(abs(found - expected) <= tolerance + RELATIVE * abs(expected) < math.inf)


def _same_set(found: "Any", expected: "Any", _: "Any", tolerance: float) -> bool:
    return set(found) == set(expected)


def _something(found: "Any", expected: "Any", _: "Any", tolerance: float) -> bool:
    """A truth value, or whether there is anything: a match object stands for True, None for False."""
    truths = [value if isinstance(value, bool) else value is not None for value in (found, expected)]
    return truths[0] == truths[1]


def _or_zero(found: "Any", expected: "Any", arguments: "Any", tolerance: float) -> bool:
    return found == 0 or same(found, expected, arguments, tolerance)


def _anything(found: "Any", expected: "Any", _: "Any", tolerance: float) -> bool:
    return True


def _root(found: "Any", _: "Any", arguments: "Any", tolerance: float) -> bool:
    """A zero of the polynomial with these coefficients, lowest first: it has several."""
    return bool(abs(sum(factor * found**power for power, factor in enumerate(arguments[0]))) <= tolerance)


def _rounded_pyramid(found: "Any", expected: "Any", arguments: "Any", tolerance: float) -> bool:
    """The surface of a square pyramid, from base edge and height; the reference takes the height for the slant one."""
    edge, height = arguments
    slant = math.sqrt((edge / 2) ** 2 + height**2)
    return same(found, expected, arguments, tolerance) or abs(found - round(edge**2 + 2 * edge * slant)) <= tolerance


def _digit_distance(found: "Any", expected: "Any", arguments: "Any", tolerance: float) -> bool:
    """The sum of distances of digits at one place, from the right; the reference begins at the left."""
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
