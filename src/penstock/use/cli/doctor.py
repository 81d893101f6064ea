"""`penstock doctor`: what is installed on this machine, and whether it works."""

import json
import os
import platform
import re
from importlib import metadata, util
from typing import Annotated, Any

import typer

from penstock.core.errors import ConfigError
from penstock.core.system import usable_processors
from penstock.core.terminal import safe_console
from penstock.core.version import __version__
from penstock.use.cli import used
from penstock.use.cli.options import AsJson


def run(
    as_json: AsJson = False,
    compile_all: Annotated[
        bool,
        typer.Option(
            "--compile", metavar="", help="First compile all kernels, as for a container image."
        ),
    ] = False,
) -> None:
    """Report what is installed here and what works.

    Checks versions, CPU cores and threads, the fast encoder, torch and CUDA, kernels for recurrent
    layers, and the cache of compiled kernels. Exits with 1 if something that penstock requires does
    not work.

    Example:
        penstock doctor
    """
    if compile_all:
        used.kernels.compile_kernels(progress=not as_json)
    findings = examine()
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        _print(findings)
    if findings["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Examine the machine.

    Returns:
        JSON-ready findings. `problems`: what must be fixed; `notes`: what works but could work
        better.
    """
    kernels, kernel_problem = _kernel_cache()
    packages, missing = _packages()
    slow = _slow_encoder()
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": usable_processors(),
        "threads": _threads(),
        "packages": packages,
        "encoder": "penstock or the vocabulary's own package" if slow else "gigatoken",
        "kernel_cache": kernels,
        "torch": _torch(),
        # It imports kernels, which must work.
        "recurrent": {} if kernel_problem else _recurrent(),
        "problems": [problem for problem in (*missing, kernel_problem) if problem],
        "notes": [slow] if slow else [],
    }


def _slow_encoder() -> str | None:
    """What fast encoding lacks; None if nothing, or if kernels do not compile, which is reported
    separately.
    """
    try:
        from penstock.tokenizers.fast import missing_gigatoken
    except ConfigError:
        return None
    return missing_gigatoken()


def _packages() -> tuple[dict[str, str | None], list[str]]:
    """Version of each package that penstock uses (None: not installed), and a problem for each
    missing required one.
    """
    # A package with a platform condition (gigatoken) is optional.
    listed = {
        re.split(r"[^\w-]", one)[0]: ";" in one
        for one in metadata.requires("penstock") or ()
        if "extra ==" not in one
    }
    needed = [name for name, is_conditional in listed.items() if not is_conditional]
    found: dict[str, str | None] = {}
    for name in (*listed, "torch", "transformers", "accelerate", "datasets", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found, [
        f"{name} is not installed: pip install {name}" for name in needed if found[name] is None
    ]


def _threads() -> dict[str, int | str | None]:
    """Number of threads of compiled code, and the environment variables that set it."""
    import numba

    variables = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS")
    return {
        "numba": numba.config.NUMBA_NUM_THREADS,
        **{name: os.environ.get(name) for name in variables},
    }


def _kernel_cache() -> tuple[dict[str, Any], str | None]:
    """Where compiled kernels are kept, and how many there are; the second value is the problem, if
    any.
    """
    try:
        from penstock.core import compiled  # noqa: F401  (refuses what cannot compile)
        from penstock.core.kernel_cache import SHIPPED, cache_folder, shipped_level
    except ConfigError as error:
        return {"folder": None, "kernels": 0, "shipped": 0}, str(error)
    folder = cache_folder()
    found = {
        "folder": None if folder is None else str(folder),
        "kernels": 0 if folder is None else len(list(folder.glob("*.kernel"))),
        "shipped": len(list(SHIPPED.glob("*.kernel"))) if shipped_level() else 0,
    }
    problem = (
        "compiled kernels can be kept nowhere, so every start compiles; set NUMBA_CACHE_DIR to a "
        "writable folder"
    )
    return found, problem if folder is None else None


def _torch() -> dict[str, Any] | None:
    """torch's version and devices; None without torch."""
    if util.find_spec("torch") is None:
        return None
    import torch

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}


def _recurrent() -> dict[str, dict[str, str | None]]:
    """Packages that compute recurrent layers: their version (None: not installed), and why they
    cannot run here.
    """
    if util.find_spec("torch") is None:
        return {}
    import torch

    from penstock.models.recurrent.packages import PACKAGES

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, dict[str, str | None]] = {}
    for name, package in PACKAGES.items():
        try:
            installed = metadata.version(package.distribution)
        except metadata.PackageNotFoundError:
            installed = None
        refusal = package.refusal(device, torch.bfloat16) or package.broken()
        found[name] = {"version": installed, "refusal": refusal}
    return found


def _print(findings: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = safe_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    threads = findings["threads"]
    table.add_row(
        "penstock", f"{findings['penstock']} on Python {findings['python']}, {findings['platform']}"
    )
    table.add_row("cores", f"{findings['cores']} (Numba starts {threads['numba']} threads)")
    set_variables = [
        f"{name}={value}" for name, value in threads.items() if name != "numba" and value
    ]
    table.add_row("set by you", " ".join(set_variables) or "no thread variables")
    table.add_row("encoder", findings["encoder"])
    cache = findings["kernel_cache"]
    shipped = f", and {cache['shipped']} came with the package" if cache["shipped"] else ""
    table.add_row("kernels", f"{cache['kernels']} compiled in {cache['folder']}{shipped}")
    torch = findings["torch"]
    if torch is None:
        table.add_row(
            "torch", escape("not installed; training needs it: pip install 'penstock[train]'")
        )
    else:
        devices = ", ".join(torch["devices"]) or "no CUDA device"
        table.add_row(
            "torch", f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}, {devices}"
        )
    for name, one in findings["recurrent"].items():
        if one["version"] is not None:
            works = one["refusal"] or "works here, as a backend of training.recurrent"
            table.add_row(name, escape(f"{one['version']}, {works}"))
    packages = findings["packages"]
    table.add_row(
        "packages", " ".join(f"{name} {version}" for name, version in packages.items() if version)
    )
    missing = [name for name, version in packages.items() if version is None]
    missing += [name for name, one in findings["recurrent"].items() if one["version"] is None]
    if missing:
        table.add_row("not installed", " ".join(missing))
    console.print(table)
    for problem in findings["problems"]:
        console.print(f"[bold red]problem[/] {escape(problem)}")
    for note in findings["notes"]:
        console.print(f"[bold yellow]note[/] {escape(note)}")
    if not findings["problems"]:
        console.print("[green]everything that the data path needs works[/]")
