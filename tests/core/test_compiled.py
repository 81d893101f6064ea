"""How kernels are compiled: views that outlive nothing, and parts that Python calls too."""

import gc

import numpy as np

from penstock.core.compiled import bare, inline_kernel, keep_alive, kernel, kernel_part


@kernel
def _overwrite_while_viewed(rounds: int) -> int:
    changed = 0
    for _ in range(rounds):
        memory = np.full(64, 7)
        view = bare(memory)
        other = np.full(64, 1)
        changed += np.sum(view != 7) + other[0] - 1
        keep_alive(memory)
    return changed


def test_a_view_of_a_kernels_own_array_holds_until_it_is_kept_no_more() -> None:
    assert _overwrite_while_viewed(1000) == 0


@inline_kernel
def _add(a: int, b: int) -> int:
    return a + b


@kernel_part
def _sum(values: np.ndarray) -> int:
    total = 0
    for value in values:
        total = _add(total, value)
    return total


@kernel
def _sum_of_both(values: np.ndarray, others: np.ndarray) -> int:
    return _sum(values) + _sum(others)


def test_parts_give_the_same_from_python_as_inside_a_kernel() -> None:
    assert _sum_of_both(np.arange(5), np.arange(3.0)) == 13
    assert _sum(np.arange(5)) == 10
    assert _add(2, 3) == 5


def test_garbage_is_collected_again_after_compiling() -> None:
    assert gc.isenabled()
    gc.disable()
    try:
        kernel(lambda: 3)()
        assert not gc.isenabled()
    finally:
        gc.enable()
