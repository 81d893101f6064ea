"""The script inside the sandbox: drops its privileges, sets the limits, runs one program, and
reports how it ended.

It is passed to `python -c` after `values` and `calls`, and imports as little as possible, because
its start is the overhead of each program. Its arguments are the descriptor of a socket, the user to
become (-1: no change), limits in the order of `_limit`, the lengths in bytes of the solution (-1:
there is none) and of the program, and folders of packages. It reads the solution, the program and
the secret from the socket, in this order, and writes one message:

    P + secret                 the program ran to its end
    M, F + reason              it ran out of memory; it failed

A program can pass in no other way: if it leaves early, however, no secret is sent.

A solution has its own process (and its own user, if users are changed), which is forked before the
program and the secret arrive. The program calls it by `function_of_solution(name)`.
"""

import os
import resource
import sys

TYPE_CHECKING = False  # as typing's, which costs milliseconds to import
if TYPE_CHECKING:
    from penstock.learn.evaluation.sandbox.calls import (  # earlier in the script
        Asked,
        Channel,
        Ended,
        SolutionError,
        serve,
    )


def _limit(cpu: int, memory: int, processes: int, disk: int, files: int) -> None:
    """Limit this process and all that it starts; -1 leaves a limit as it is."""
    for kind, value, grace in (
        # The program gets SIGXCPU, which it can ignore, and a second later SIGKILL, which it
        # cannot.
        (resource.RLIMIT_CPU, cpu, 1),
        (resource.RLIMIT_AS, memory, 0),
        (resource.RLIMIT_NPROC, processes, 0),
        (resource.RLIMIT_FSIZE, disk, 0),
        (resource.RLIMIT_NOFILE, files, 0),
        # A limit of 0 would still send dumps to a `core_pattern` that is a pipe; 1 stops that too
        # (core(5)).
        (resource.RLIMIT_CORE, 1, 0),
    ):
        if value >= 0:
            hard = resource.getrlimit(kind)[1]
            most = value + grace if hard == resource.RLIM_INFINITY else min(value + grace, hard)
            resource.setrlimit(kind, (min(value, most), most))


def _become(user: int) -> None:
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def _report(error: BaseException) -> bytes:
    """M, or F with the exception's name, message and line in the program; the program's code may
    make the message.
    """
    if isinstance(error, MemoryError):
        return b"M"  # no reason, because there is no memory to write one
    try:
        message = str(error)[:400]
    except BaseException:
        message = "(its message cannot be read)"
    line, traceback = 0, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<program>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    place = f" (line {line})" if line else ""
    return f"F{type(error).__name__[:80]}: {message}{place}".encode("utf-8", "replace")


def _whole(pipe: int, size: int) -> bytes:
    """Read exactly `size` bytes; a single read may return fewer."""
    read, found = os.read, b""
    while len(found) < size:
        found += read(pipe, size - len(found))
    return found


def _attest(first: bytes, _: object) -> bytes:
    return first


def _start_solution(pipe: int, user: int, size: int, limits: list[int]) -> "tuple[int, Channel]":
    """Read the solution's code from the socket and start its process; returns its process id and
    the channel to it.
    """
    source = _whole(pipe, size).decode()
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child:
        os.close(ours[1])
        os.close(theirs[0])
        return child, Channel(ours[0], theirs[1])
    try:
        for descriptor in (pipe, ours[0], theirs[1]):
            os.close(descriptor)
        _become(user + 1 if user >= 0 else user)
        _limit(*limits)
        serve(Channel(theirs[0], ours[1]), source, _report)
    finally:
        os._exit(0)


def main(pipe: int, user: int, solution_size: int, size: int, limits: list[int]) -> None:
    """Run the program from the socket, and end this process."""
    write, leave = os.write, os._exit
    child, channel = (
        _start_solution(pipe, user, solution_size, limits) if solution_size >= 0 else (0, None)
    )
    source = _whole(pipe, size)
    _become(user)
    _limit(*limits)
    try:
        # A fresh __main__, so that code that looks up its own module finds the program, not this
        # script.
        module = sys.modules["__main__"] = type(sys)("__main__")
        program = compile(source, "<program>", "exec", dont_inherit=True)
        if channel is not None:
            module.__dict__["function_of_solution"] = Asked(channel).function
        # The secret is read just before the program runs, and while it runs no variable holds it:
        # it is only on the stack of this expression, which Python code cannot read.
        report = _attest(b"P" + _whole(pipe, 32), eval(program, module.__dict__))
    except SolutionError as error:
        report = error.report
    except Ended:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        leave(status if status >= 0 else 128 - status)  # end as the solution ended
    except BaseException as error:
        report = _report(error)
    write(pipe, report)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        leave(0)


if __name__ == "__main__":
    _pipe, _user, *_limits, _solution_size, _size = map(int, sys.argv[1:10])
    sys.path += sys.argv[10:]
    sys.argv[:] = ["program"]
    main(_pipe, _user, _solution_size, _size, _limits)
