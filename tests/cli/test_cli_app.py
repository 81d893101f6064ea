"""The command line as a user meets it: exit codes, errors without a traceback, quiet pipes."""

import io
import json
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.main import get_command

from makers.processes import run_code, run_penstock
from patience import PATIENCE_SECONDS
from penstock.core.errors import ConfigError
from penstock.use import cli
from penstock.use.cli import help_pages

COMMAND = [sys.executable, "-m", "penstock"]


def test_help_lists_every_verb_in_the_order_of_their_use():
    shown = run_penstock("--help").stdout
    assert re.findall(r"^(?:[A-Z][a-z ]{13}| {14})([a-z-]+) +\w", shown, re.MULTILINE) == list(
        cli.VERBS
    )


def test_the_first_page_fits_a_screen():
    """80 columns; without empty lines it fits into the 24 lines of a small terminal, with the
    prompt below it.
    """
    assert {*help_pages.GROUPS["Look at it"]} == {"inspect", "plan", "plot"}
    page = help_pages.overview(colours=False)
    assert max(map(len, page.splitlines())) <= 80
    assert "\x1b" not in page
    assert page.count("\n") + 1 < help_pages._LINES
    low = help_pages.overview(colours=True, lines=24)
    assert low.count("\n") + 2 <= 24
    assert (
        re.sub(r"\x1b\[\d+m", "", low).splitlines()
        == [line for line in page.splitlines() if line][:-1]
    )
    assert [
        summary
        for group in help_pages.GROUPS.values()
        for summary in group.values()
        if len(summary) > 51
    ] == []


def test_colours_are_for_terminals(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert help_pages.colourful(Terminal())
    assert not help_pages.colourful(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "")
    assert not help_pages.colourful(Terminal())


def test_the_first_page_is_the_same_in_other_ways():
    shown = run_penstock("--help").stdout
    assert run_penstock("-h").stdout == shown
    assert run_penstock().stdout == shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(verb):
    found = run_penstock(verb, "--help")
    assert found.returncode == 0
    assert f"penstock {verb}" in found.stdout


HEAVY = ("numpy", "pydantic", "pyarrow", "rich", "torch", "transformers", "yaml")


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_loads_nothing_heavy(verb):
    code = (
        f"import sys; from penstock.use.cli import app; code = app._run(['{verb}', '--help']);"
        f"found = sys.modules.keys() & set({HEAVY!r}); assert not (code or found), (code, found)"
    )
    run_code(code, check=True)


def test_a_page_says_all_of_a_verbs_options_in_its_width():
    for verb in ("train", "prepare", "chat", "tokenizer"):
        command = get_command(cli.build_app([verb])).commands[verb]
        for width in (60, 100):
            page = help_pages.verb_page(command, f"penstock {verb}", colours=False, width=width)
            options = page.partition("\n Example")[0]
            assert max(map(len, options.splitlines())) <= width
            said = re.sub(r"\s+", " ", options)
            for one in command.params:
                assert not one.opts[0].startswith("-") or one.opts[0] in said
                assert re.sub(r"\s+", " ", one.help.replace("`", "")) in said
            for inner in getattr(command, "commands", ()):
                assert f"\n  {inner} " in page
    assert "\x1b[36m--set KEY=VALUE\x1b[0m" in help_pages.verb_page(
        get_command(cli.build_app(["train"])).commands["train"], "x", colours=True, width=80
    )


def test_help_behind_other_words_is_the_same_page():
    assert run_penstock("train", "a.yaml", "--help").stdout.strip() == (
        run_penstock("train", "-h").stdout.strip()
    )
    assert "penstock tokenizer add" in run_penstock("tokenizer", "add", "-h").stdout
    assert run_penstock("tokenizer", "nothing", "-h").returncode == 2


def test_unknown_verb_is_refused_with_the_nearest_one():
    found = run_penstock("docter")
    assert found.returncode == 2
    assert "doctor" in found.stderr


def test_a_verb_loads_only_itself():
    code = (
        "import sys; from penstock.use.cli import build_app; build_app(['doctor']);"
        "from penstock.use.cli import VERBS;"
        "print([verb for verb in VERBS if f'penstock.use.cli.{verb}' in sys.modules])"
    )
    assert run_code(code, check=True).stdout.strip() == "['doctor']"


def test_errors_of_ours_print_one_line_and_exit_1(monkeypatch, capsys):
    def fail(arguments: list[str]) -> int:
        raise ConfigError("a.yaml: seed is 'x'; due a number")

    monkeypatch.setattr(cli.app, "_run", fail)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == "penstock: a.yaml: seed is 'x'; due a number\n"


def test_foreign_errors_keep_their_traceback(monkeypatch):
    def fail(arguments: list[str]) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli.app, "_run", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()


def test_ctrl_c_exits_130():
    code = (
        "import signal, penstock.use.cli.app as c\n"
        "c._run = lambda a: (print('on', flush=True), signal.pause())\nc.main()"
    )
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

    monkeypatch.setattr("penstock.use.cli.verify.run", stop)
    monkeypatch.setattr(sys, "argv", ["penstock", "verify", "data"])
    with pytest.raises(SystemExit, match="130"):
        cli.main()
    assert "penstock: stopped\n" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_closed_pipe_is_quiet(lines):
    code = (
        "import penstock.use.cli.app as c\n"
        f"c._run = lambda a: [print('x' * 80) for _ in range({lines})] and 0\nc.main()"
    )
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

    from penstock.models.recurrent.packages import PACKAGES
    from penstock.use.cli import doctor

    def version(name, real=importlib.metadata.version):
        return "9.9" if name == "flash-linear-attention" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    for name in set(PACKAGES) - {"fla"}:
        monkeypatch.setitem(sys.modules, name, None)
    for on_gpu, says in (
        (False, "runs on cuda only, not on cpu"),
        (True, "works here, as a backend"),
    ):
        monkeypatch.setattr("torch.cuda.is_available", lambda found=on_gpu: found)
        findings = doctor.examine()
        assert findings["recurrent"]["mamba_ssm"]["refusal"].startswith(
            "is not installed: pip install mamba-ssm"
        )
        doctor._print(findings)
        out = " ".join(capsys.readouterr().out.split())
        assert f"fla 9.9, {says}" in out
        assert "mamba_ssm causal_conv1d" in out


def test_doctor_names_a_missing_encoder(monkeypatch, capsys):
    from penstock.use.cli import doctor

    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    findings = doctor.examine()
    assert findings["encoder"] == "penstock or the vocabulary's own package"
    assert findings["problems"] == []  # it works, slowly
    (note,) = findings["notes"]
    assert "times as long without it" in note
    assert "pip install gigatoken" in note
    doctor._print(findings)
    assert "pip install gigatoken" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words",
    ["train run.yaml -o run", "chat run", "serve run", "export run -o out", "eval run --task mmlu"],
)
def test_a_verb_that_needs_torch_tells_the_pip_command(words):
    code = f"import sys; sys.modules['torch'] = None; sys.argv = 'penstock {words}'.split()\n"
    done = run_code(f"{code}from penstock.use.cli import main; main()")
    assert done.returncode == 1
    assert (
        done.stderr == "penstock: torch is not installed; it comes with the extra: pip install "
        "'penstock[train]'\n"
    )


def test_doctor_names_what_is_missing_and_how_to_get_it(monkeypatch, capsys):
    from importlib import metadata

    from penstock.use.cli import doctor

    version = metadata.version

    def without(name):
        if name == "jinja2":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without)
    monkeypatch.setattr(
        metadata,
        "requires",
        lambda _: [
            "numpy>=2",
            "jinja2>=3.1",
            "fast; platform_machine == 'x'",
            "torch; extra == 'train'",
        ],
    )
    monkeypatch.setattr(doctor, "_torch", lambda: None)
    findings = doctor.examine()
    assert findings["problems"] == ["jinja2 is not installed: pip install jinja2"]
    doctor._print(findings)
    assert "pip install 'penstock[train]'" in capsys.readouterr().out
