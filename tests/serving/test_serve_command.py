"""`penstock serve` on a real model, as a process: the engine's own text, SIGTERM, and many clients
at once.
"""

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from serving_makers import TEMPLATE

import penstock as ps
from makers.processes import child_environment, run_code
from patience import PATIENCE_SECONDS
from penstock.chat import load_template
from penstock.core.errors import ConfigError
from penstock.learn.generation import Engine, Sampling
from penstock.learn.generation.session import begin_ids, encode_chat

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from serving_load import Load, resident_bytes


@pytest.mark.parametrize(
    "command", [("--api-key", "secret", "--grace-seconds", "0.3")], indirect=True
)
def test_a_real_model(command, model, tokenizer):
    url, process = command.url, command.process
    stop_ids = [tokenizer.special_tokens["<|end|>"], tokenizer.eos_id]
    engine = Engine(model, tokenizer, context_length=128, stop_ids=stop_ids)
    messages = [{"role": "user", "content": "Hi"}]
    prompts = [
        [*begin_ids(tokenizer), *tokenizer.encode("Once").tolist()],
        encode_chat(messages, load_template(TEMPLATE, tokenizer=tokenizer), tokenizer),
    ]
    ways = [Sampling(max_tokens=30, seed=5), Sampling(max_tokens=30, temperature=0, min_tokens=1)]
    expected = engine.generate_all(prompts, ways)
    with OpenAI(
        base_url=f"{url}/v1", api_key="secret", timeout=PATIENCE_SECONDS, max_retries=0
    ) as client:
        assert [found.id for found in client.models.list()] == ["little"]
        reported = client.completions.create(model="little", prompt="Once", max_tokens=30, seed=5)
        assert reported.choices[0].text == expected[0].text
        stream = client.chat.completions.create(
            model="little", messages=messages, max_tokens=30, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected[1].text
    assert httpx.get(f"{url}/v1/models").status_code == 401
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) in (0, -signal.SIGTERM)
    assert process.stderr.read() == ""


@pytest.mark.slow
@pytest.mark.parametrize("command", [("--requests-per-second", "0")], indirect=True)
def test_64_clients_of_which_some_leave_and_some_send_rubbish(command):
    """Benchmarks have the same for a minute."""
    Load(command.url, "little", clients=64, seconds=1.5).run()
    before = resident_bytes(command.process.pid)
    report = Load(command.url, "little", clients=64, seconds=5).run()
    assert resident_bytes(command.process.pid) - before < 20 << 20
    assert report.torn == []
    assert set(report.codes) <= {200, 400, 413, 429}
    assert min(report.complete, report.left, report.codes[400], report.codes[413]) > 0
    metrics = httpx.get(f"{command.url}/metrics").text.splitlines()
    assert "penstock_sequences_running 0.0" in metrics
    assert "penstock_requests_waiting 0.0" in metrics
    assert "penstock_requests_in_flight 1.0" in metrics
    assert not [line for line in metrics if 'code="5' in line]
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(PATIENCE_SECONDS) is not None
    assert "Traceback" not in command.process.stderr.read()


def test_a_run_is_served_from_python(folder):
    code = (
        f"import penstock as ps; ps.open_run({str(folder)!r}).serve(name='mine', port=0, "
        "threads=1, device='cpu')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    ) as process:
        try:
            line = process.stdout.readline()
            asked = {"model": "mine", "prompt": "Once", "max_tokens": 4, "temperature": 0}
            answer = httpx.post(
                f"{line.split()[-1]}/v1/completions", json=asked, timeout=PATIENCE_SECONDS
            ).json()
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
        errors = process.stderr.read()
    assert (line.startswith("penstock: mine at http://127.0.0.1:"), "Traceback" in errors) == (
        True,
        False,
    ), errors
    expected = ps.open_run(folder).generate(
        "Once", max_tokens=4, temperature=0, threads=1, device="cpu"
    )
    assert (answer["model"], answer["choices"][0]["text"]) == ("mine", expected)
    with pytest.raises(ConfigError, match=r"Run\.serve.*'prot'.*'port'"):
        ps.open_run(folder).serve(prot=8000)


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra_the_pip_command_is_told(missing):
    code = (
        f"import sys; sys.modules['{missing}'] = None\n"
        "import penstock.use.cli.serve, penstock.use.serving\n"
        "assert 'torch' not in sys.modules\n"
        "try: penstock.use.serving.Server\n"
        "except penstock.core.errors.MissingExtraError as error: print(error)"
    )
    reported = run_code(code, check=True).stdout
    assert (
        reported
        == f"{missing} is not installed; it comes with the extra: pip install 'penstock[serve]'\n"
    )
