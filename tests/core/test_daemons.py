"""Threads that wait for stores: results as from any pool, and an end of the process that waits for
none of them.
"""

import threading
import time

import pytest

from makers.processes import run_code
from penstock.data.stores.daemons import DaemonPool, result_of, wait_for


def test_results_come_in_order_and_errors_where_they_belong():
    pool = DaemonPool(3)
    assert list(pool.map(lambda number: number**2, range(50))) == [
        number**2 for number in range(50)
    ]
    futures = [pool.submit(lambda n: 1 // n, number) for number in (1, 0, 2)]
    assert result_of(futures[0]) == 1
    wait_for(futures[1])
    with pytest.raises(ZeroDivisionError, match="division"):
        result_of(futures[1])
    assert result_of(futures[2]) == 0


def test_no_more_threads_than_allowed_and_all_are_daemons():
    running, most, lock, seen = 0, 0, threading.Lock(), []

    def work(_):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            seen.append(threading.current_thread().daemon)
        time.sleep(0.002)
        with lock:
            running -= 1

    with DaemonPool(4) as pool:
        futures = [pool.submit(work, number) for number in range(100)]
    assert all(future.done() for future in futures), "a block waits for what was begun in it"
    assert most <= 4
    assert all(seen)
    with pytest.raises(RuntimeError, match="the pool was left"):
        pool.submit(work, 0)


def test_after_an_error_what_has_not_begun_is_forgotten():
    gate, done, futures = threading.Event(), [], []

    def work():
        with DaemonPool(1) as pool:
            futures.append(pool.submit(gate.wait))
            futures.extend(pool.submit(done.append, number) for number in range(5))
            threading.Timer(0.1, gate.set).start()
            raise KeyError("wrong")

    with pytest.raises(KeyError, match="wrong"):
        work()
    assert futures[0].done()
    assert all(one.cancelled() for one in futures[1:])
    assert done == []


def test_ctrl_c_does_not_wait():
    gate = threading.Event()

    def work():
        with DaemonPool(1) as pool:
            pool.submit(gate.wait)
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        work()
    gate.set()


def test_nothing_keeps_results_alive():
    import gc
    import weakref

    class Thing:
        pass

    pool = DaemonPool(1)
    thing = result_of(pool.submit(Thing))
    seen = weakref.ref(thing)
    result_of(pool.submit(int))
    del thing
    gc.collect()
    assert seen() is None


def test_the_end_of_the_process_waits_for_no_thread():
    code = """
        import threading, time
        from penstock.data.stores.daemons import DaemonPool, result_of
        pool = DaemonPool(2)
        pool.submit(time.sleep, 10**6)
        answers = []

        def wait():
            try:
                result_of(pool.submit(time.sleep, 10**6))
            except Exception as error:
                print(type(error).__name__, error)

        thread = threading.Thread(target=wait)
        thread.start()
        import atexit
        time.sleep(0.2)
        print("end", flush=True)
        from penstock.data.stores import daemons
        daemons.end()
        thread.join()
    """
    found = run_code(code, check=True, timeout=60)
    assert found.stdout.splitlines() == [
        "end",
        "StoreError the process ends, so no store is read any more",
    ]
