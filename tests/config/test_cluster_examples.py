"""The examples for SLURM, Kubernetes and Docker: their commands are ours, and the script runs as a
job would.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from makers.datasets import prepare_here
from makers.processes import child_environment
from makers.texts import WATER, make_texts
from makers.tokenizers import tiny_tokenizer
from patience import PATIENCE_SECONDS

CLUSTER = Path(__file__).parents[2] / "examples/cluster"
SLURM, KUBERNETES, DOCKERFILE = (
    CLUSTER / "slurm.sh",
    CLUSTER / "kubernetes.yaml",
    CLUSTER / "Dockerfile",
)


def parse_penstock(words):
    """Parse the words after `penstock` as its command line does; (verb, parameters)."""
    from penstock.use.cli import build_app

    command = typer.main.get_command(build_app(words))
    context = command.make_context("penstock", list(words))
    verb = command.get_command(context, words[0])
    assert verb is not None, words[0]
    return words[0], verb.make_context(words[0], list(words[1:]), parent=context).params


def parse_torchrun(words):
    """Torchrun's own reading of its command line, and what it starts."""
    run = pytest.importorskip("torch.distributed.run")
    given = run.parse_args(words)
    assert (given.module, given.training_script) == (True, "penstock")
    return given, parse_penstock(given.training_script_args)


def slurm_command():
    """The words of the script's last command, with values for its variables."""
    text = SLURM.read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.startswith("srun"))
    values = {
        "run_file": "run.yaml",
        "run": "runs/a",
        "processes": "8",
        "head_node": "n1",
        "port": "20001",
    }
    return shlex.split(re.sub(r"\$(\w+)", lambda name: values.get(name[1], "7"), line))


def test_the_slurm_script_starts_our_trainer():
    subprocess.run(["bash", "-n", SLURM], check=True)
    words = slurm_command()
    given, (verb, parameters) = parse_torchrun(words[words.index("torchrun") + 1 :])
    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend, given.rdzv_endpoint) == (
        "7",
        "8",
        "c10d",
        "n1:20001",
    )
    assert (verb, parameters["run_file"], parameters["output"], parameters["resume"]) == (
        "train", "run.yaml", "runs/a", True,
    )  # fmt: skip
    directives = re.findall(r"^#SBATCH --([\w-]+)", SLURM.read_text(), re.M)
    assert {"nodes", "requeue", "signal", "time"} <= set(directives)


def test_the_kubernetes_manifest_is_a_service_and_a_job():
    service, job = yaml.safe_load_all(KUBERNETES.read_text())
    assert (service["apiVersion"], service["kind"], service["spec"]["clusterIP"]) == (
        "v1",
        "Service",
        "None",
    )
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] in ("OnFailure", "Never")
    name = job["metadata"]["name"]
    # Pods of an indexed job are called <job>-<index>; their names resolve in the service that
    # `subdomain` names.
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    (container,) = pod["containers"]
    given, (verb, parameters) = parse_torchrun(container["command"][1:])
    assert container["command"][0] == "torchrun"
    (port,) = (one["port"] for one in service["spec"]["ports"])
    assert given.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:{port}"
    assert int(given.nnodes) == spec["completions"]
    assert int(given.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (verb, parameters["resume"]) == ("train", True)
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
    assert all(isinstance(one["value"], str) for one in container["env"])


def test_the_image_compiles_kernels_with_our_command():
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    instructions = [
        line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")
    ]
    assert instructions[0][0] == "FROM"
    assert {name for name, _ in instructions} <= {
        "FROM",
        "ARG",
        "ENV",
        "RUN",
        "COPY",
        "WORKDIR",
        "CMD",
    }
    for name, rest in instructions:
        if name == "RUN":
            subprocess.run(["bash", "-n"], input=rest, text=True, check=True)
        if name == "COPY":
            assert all((CLUSTER.parents[1] / path).exists() for path in rest.split()[:-1])
    (command,) = re.findall(r"penstock (doctor.*?)(?:&&|$)", text, re.M)[-1:]
    verb, parameters = parse_penstock(command.split())
    assert (verb, parameters["compile_all"]) == ("doctor", True)
    # The names that the package looks for; see `LEVELS`.
    from penstock.core.kernel_cache import LEVELS

    assert f"ARG CPU={LEVELS['x86_64'][0]}\n" in text
    assert f"--build-arg CPU={LEVELS['aarch64'][0]}" in text
    extras = re.search(r"ARG EXTRAS=(\S+)", text)[1].split(",")
    assert all(
        f"\n{extra} = [" in (CLUSTER.parents[1] / "pyproject.toml").read_text() for extra in extras
    )


RUN_FILE = """
data:
  sources: [{path: data}]
  loader: {sequence_length: 32, rows_per_step: 4}
model: {layers: 1, width: 32, heads: 2}
training: {steps: 6, checkpoints: {every: 2}}
"""


@pytest.mark.slow
def test_the_slurm_script_trains(tmp_path):
    """With stand-ins for SLURM's programs: one node, two processes, then one."""
    pytest.importorskip("torch")
    texts = make_texts(300, 0, words=WATER, shortest=2, longest=20, end="")
    prepare_here(iter(texts), tiny_tokenizer(tmp_path / "tokenizer", texts, 300), tmp_path / "data")
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "scontrol": "echo localhost",
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    environment = child_environment(
        PATH=f"{programs}:{os.environ['PATH']}",
        SLURM_JOB_NODELIST="localhost",
        SLURM_JOB_ID=str(os.getpid()),
        SLURM_JOB_NUM_NODES="1",
        SLURM_CPUS_PER_TASK="2",
    )
    for steps, processes in ((4, "2"), (6, "1")):  # the second time, it goes on
        (tmp_path / "run.yaml").write_text(RUN_FILE.replace("steps: 6", f"steps: {steps}"))
        done = subprocess.run(
            ["bash", SLURM, "run.yaml", "runs/a"],
            cwd=tmp_path,
            env={**environment, "PROCESSES_PER_NODE": processes},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    metrics = [
        json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()
    ]
    assert max(line["step"] for line in metrics if "step" in line) >= 5
