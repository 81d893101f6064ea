"""The command line as a user meets it: exit codes, errors without a traceback, quiet pipes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from makers.processes import child_environment, run_code, run_penstock
from patience import PATIENCE_SECONDS
from penstock import cli
from penstock.core.errors import ConfigError

COMMAND = [sys.executable, "-m", "penstock"]


def test_help_lists_every_verb_in_the_order_of_their_use():
    shown = run_penstock("--help").stdout
    places = [shown.find(f"│ {verb} ") for verb in cli.VERBS]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(verb):
    found = run_penstock(verb, "--help")
    assert found.returncode == 0
    assert f"penstock {verb}" in found.stdout


def test_unknown_verb_is_refused_with_the_nearest_one():
    found = run_penstock("docter")
    assert found.returncode == 2
    assert "doctor" in found.stderr


def test_a_verb_loads_only_itself():
    code = (
        "import sys; from penstock.cli import build_app; build_app(['doctor']);"
        "from penstock.cli import VERBS;"
        "print([verb for verb in VERBS if f'penstock.cli.{verb}' in sys.modules])"
    )
    assert run_code(code, check=True).stdout.strip() == "['doctor']"


def test_errors_of_ours_print_one_line_and_exit_1(monkeypatch, capsys):
    def fail(arguments: list[str]) -> int:
        raise ConfigError("a.yaml: seed is 'x'; due a number")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == "penstock: a.yaml: seed is 'x'; due a number\n"


def test_foreign_errors_keep_their_traceback(monkeypatch):
    def fail(arguments: list[str]) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "_run", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()


def test_ctrl_c_exits_130():
    code = "import signal, penstock.cli as c; c._run = lambda a: (print('on', flush=True), signal.pause()); c.main()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (130, "penstock: stopped\n")


def test_a_stopped_verb_says_so(monkeypatch, capsys):
    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.verify.run", stop)
    monkeypatch.setattr(sys, "argv", ["penstock", "verify", "data"])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert "penstock: stopped\n" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_closed_pipe_is_quiet(lines):
    code = f"import penstock.cli as c; c._run = lambda a: [print('x' * 80) for _ in range({lines})] and 0; c.main()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_doctor_finds_this_machine_usable():
    found = run_penstock("doctor", "--json")
    findings = json.loads(found.stdout)
    assert found.returncode == 0, findings
    assert findings["problems"] == []
    assert findings["encoder"] == "gigatoken"
    assert findings["kernel_cache"]["folder"]


def test_doctor_says_whether_kernels_of_recurrent_layers_run_here(monkeypatch, capsys):
    pytest.importorskip("torch")
    import importlib.metadata

    from penstock.cli import doctor
    from penstock.models.recurrent.packages import PACKAGES

    def version(name, real=importlib.metadata.version):
        return "9.9" if name == "flash-linear-attention" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    for name in set(PACKAGES) - {"fla"}:
        monkeypatch.setitem(sys.modules, name, None)
    for on_gpu, says in ((False, "runs on cuda only, not on cpu"), (True, "works here, as a backend")):
        monkeypatch.setattr("torch.cuda.is_available", lambda found=on_gpu: found)
        findings = doctor.examine()
        assert findings["recurrent"]["mamba_ssm"]["refusal"].startswith("is not installed: pip install mamba-ssm")
        doctor._print(findings)
        out = " ".join(capsys.readouterr().out.split())
        assert f"fla 9.9, {says}" in out
        assert "mamba_ssm causal_conv1d" in out


def test_doctor_names_a_missing_encoder(monkeypatch, capsys):
    from penstock.cli import doctor

    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    findings = doctor.examine()
    assert findings["encoder"] == "the vocabulary's own package"
    assert findings["problems"] == []  # it works, slowly
    (note,) = findings["notes"]
    assert "times as long without it" in note
    assert "pip install gigatoken" in note
    doctor._print(findings)
    assert "pip install gigatoken" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words", ["train run.yaml -o run", "chat run", "serve run", "export run -o out", "eval run --task mmlu"]
)
def test_a_verb_that_needs_torch_tells_the_pip_command(words):
    code = f"import sys; sys.modules['torch'] = None; sys.argv = 'penstock {words}'.split()\n"
    done = run_code(f"{code}from penstock.cli import main; main()")
    assert done.returncode == 1
    assert done.stderr == "penstock: torch is not installed; it comes with the extra: pip install 'penstock[train]'\n"


def test_doctor_names_what_is_missing_and_how_to_get_it(monkeypatch, capsys):
    from importlib import metadata

    from penstock.cli import doctor

    version = metadata.version

    def without(name):
        if name == "jinja2":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    monkeypatch.setattr(
        metadata,
        "requires",
        lambda _: ["numpy>=2", "jinja2>=3.1", "fast; platform_machine == 'x'", "torch; extra == 'train'"],
    )
    monkeypatch.setattr(doctor, "_torch", lambda: None)
    findings = doctor.examine()
    assert findings["problems"] == ["jinja2 is not installed: pip install jinja2"]
    doctor._print(findings)
    assert "pip install 'penstock[train]'" in capsys.readouterr().out


def completions(line: str, shell: str = "bash") -> list[str]:
    """What a shell would offer for a command line, whose last word is being written."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)} if shell == "bash" else {}
    asked = {"_PENSTOCK_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, **words}
    found = run_code("from penstock.cli import main; main()", env=child_environment(**asked))
    assert found.stderr == ""
    return found.stdout.split("\n")[:-1] if shell == "bash" else [found.stdout]


def test_shells_complete_verbs_and_options():
    assert completions("penstock pl") == ["plan", "plot"]
    assert [verb for verb in completions("penstock ") if verb] == list(cli.VERBS)
    assert completions("penstock tokenizer tr") == ["train"]
    assert "--tokenizer" in completions("penstock prepare --to")
    assert completions("penstock train --dry") == ["--dry-run"]
    assert '"plan"' in completions("penstock pl", "zsh")[0]
    shown = run_penstock("--help").stdout
    assert "--install-completion" in shown


def test_completing_a_verb_loads_only_that_verb():
    code = (
        "import sys; from penstock.cli import build_app; build_app([]);"
        "from penstock.cli import VERBS;"
        "print([verb for verb in VERBS if f'penstock.cli.{verb}' in sys.modules], 'torch' in sys.modules)"
    )
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock doctor --js", "COMP_CWORD": "2"}
    assert run_code(code, env=child_environment(**asked), check=True).stdout.strip() == "['doctor'] False"


def test_bash_completes_after_the_installation(tmp_path):
    """`--install-completion` writes what bash reads at its start; its function then asks the command for the words."""
    if not (bash := shutil.which("bash")):
        pytest.skip("bash is not installed")
    command = tmp_path / "penstock"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # the shell is named, not searched for
    subprocess.run([command, "--install-completion", "bash"], env=environment, capture_output=True, check=True)
    code = (
        f"source {tmp_path}/.bashrc; COMP_WORDS=(penstock prep); COMP_CWORD=1\n"
        "_penstock_completion penstock; echo ${COMPREPLY[@]}"
    )
    found = subprocess.run([bash, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "prepare\n"


def test_completion_loads_nothing_heavy():
    """What the user waits for at each press of the key; typer itself takes most of it."""
    code = "import sys\nfrom penstock.cli import main\ntry: main()\nexcept SystemExit: print(*sys.modules)"
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock pl", "COMP_CWORD": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    words = found.stdout.split()
    assert words[:2] == ["plan", "plot"]
    heavy = {"torch", "numba", "numpy", "pyarrow", "tokenizers", "rich.table", "jinja2"}
    assert heavy & set(words) == set()
