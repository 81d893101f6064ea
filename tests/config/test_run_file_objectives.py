"""Objectives in the run file: by name, by kind and by preset; what is refused, and with which
words.
"""

import jsonschema
import pytest
import yaml

from penstock import Causal, Denoise, Infill
from penstock.core.errors import ConfigError
from penstock.plan.objectives import CausalLM, PrefixLM, SpanCorruption
from penstock.use.config import load_run, run_schema

FILE = """\
data:
  sources:
    - path: data/web
      objective: {}
  loader:
    sequence_length: 256
    rows_per_step: 8
"""

TASKS = """
        kind: denoise
        roll: false
        sentinels: [5, "<extra_id_1>"]
        tasks:
          - {kind: spans, rate: 0.15, mean: 3, mode: "[NLU]"}
          - {kind: spans, rate: 1/3, mean: 3, weight: 2}
          - {kind: prefix, sentinel: false}
          - kind: causal"""

GOOD = {
    "causal": Causal(),
    "infill": Infill(),
    "ul2": Denoise.ul2(),
    "ul2r": Denoise.ul2r(),
    "t5": Denoise.t5(),
    "{kind: infill, rate: 0.9, split: character, tokens: [1, 2, <s>], room: 4}": Infill(
        rate=0.9, split="character", tokens=(1, 2, "<s>"), room=4
    ),
    (
        "{kind: infill, separator: <file_sep>, fragment_rate: 0.7, fragment_tokens: 99, "
        "max_middle: 400, ignore_prefix: '# Notes'}"
    ): Infill(
        separator="<file_sep>",
        fragment_rate=0.7,
        fragment_tokens=99,
        max_middle=400,
        ignore_prefix="# Notes",
    ),
    "{kind: infill, separator: 50, ignore_prefix: 7}": Infill(separator=50, ignore_prefix=7),
    "{preset: ul2r, sentinels: [7, 8, 9], modes: {R: 3, S: '[S]'}}": Denoise.ul2r(
        modes={"R": 3, "S": "[S]"}, sentinels=[7, 8, 9]
    ),
    "{preset: ul2, modes: null, max_length: 512}": Denoise.ul2(modes=None, max_length=512),
    "{kind: denoise, preset: t5, final_sentinel: true}": Denoise.t5(final_sentinel=True),
    TASKS: Denoise(
        [
            SpanCorruption(0.15, 3, mode="[NLU]"),
            SpanCorruption("1/3", 3, weight=2),
            PrefixLM(sentinel=False),
            CausalLM(),
        ],
        roll=False,
        sentinels=[5, "<extra_id_1>"],
    ),
}


@pytest.fixture
def load(tmp_path):
    def load(objective, assignments=()):
        (tmp_path / "run.yaml").write_text(FILE.format(objective))
        return load_run(tmp_path / "run.yaml", assignments).data.sources[0].objective

    return load


@pytest.mark.parametrize("text", GOOD)
def test_a_run_file_says_what_python_says(load, text):
    assert load(text) == GOOD[text]


@pytest.mark.parametrize("text", GOOD)
def test_the_schema_accepts_it(text):
    jsonschema.validate(yaml.safe_load(FILE.format(text)), run_schema())


def test_overrides_reach_into_an_objective(load):
    assignments = ["data.sources.0.objective.rate=1", "data.sources.0.objective.spm_rate=0"]
    assert load("{kind: infill}", assignments) == Infill(rate=1, spm_rate=0)
    assert load("causal", ["data.sources.web.objective=ul2r"]) == Denoise.ul2r()


OWN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Half:
    rate: float = 0.5
    name = "half"

    def document_limit(self, sequence_length): return sequence_length
    def measure(self, lengths, keys): return lengths
    def write(self, tokens, weights, key): raise NotImplementedError

def make(share): return Half(share)
made = 3
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_half.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("function", ["own_half.py:Half", "own_half:Half"])
@pytest.mark.parametrize("evaluator", [False, True])
def test_an_objective_of_ones_own(own, load, tmp_path, function, evaluator):
    text = f"{{kind: own, function: '{function}', arguments: {{rate: 0.25}}}}"
    jsonschema.validate(yaml.safe_load(FILE.format(text)), run_schema())
    if evaluator:
        extra = (
            "training: {steps: 1, evaluators: {held: {data: data/held, objective: "
            f"{text}}}}}}}\n"
        )
        (tmp_path / "run.yaml").write_text(FILE.format("causal") + extra)
        found = load_run(tmp_path / "run.yaml").training.evaluators["held"].objective
    else:
        found = load(text)
    assert repr(found) == "Half(rate=0.25)"
    assert repr(load(f"{{kind: own, function: '{function}'}}")) == "Half(rate=0.5)"
    assert (
        repr(load("{kind: own, function: 'own_half:make', arguments: {share: 1}}"))
        == "Half(rate=1)"
    )


OWN_MISTAKES = {
    "{kind: own}": r"objective.function: missing; it is required: `module:name`",
    "{kind: own, function: half}": r"run.yaml:4: data.sources.0.objective: function: found 'half', expected module:fun",  # noqa: E501
    "{kind: own, function: 'own_half:Haf'}": r"own_half has no 'Haf'; did you mean 'Half'\?",
    "{kind: own, function: 'own_half:made'}": r"function: own_half:made is 3; expected a class or a function",  # noqa: E501
    "{kind: own, function: 'own_half:Half', arguments: {rat: 1}}": r"arguments: own_half:Half takes \(rate: .*'rat'",  # noqa: E501
    "{kind: own, function: 'own_half:Half', rate: 1}": r"objective.rate: unknown key",
    "{kind: own, function: 'builtins:dict'}": r"objective must be one such as .*got \{\}, which has no",  # noqa: E501
}


@pytest.mark.parametrize("text", OWN_MISTAKES)
def test_mistakes_in_an_objective_of_ones_own(own, load, text):
    with pytest.raises(ConfigError, match=OWN_MISTAKES[text]):
        load(text)


MISTAKES = {
    "ul3": (
        r"run.yaml:4: data.sources.0.objective: found 'ul3', expected 'causal', 'infill', "
        r"'masked_diffusion', 'block_diffusion', 'ul2', 'ul2r' or 't5'"
    ),
    "{kind: infil}": (
        r"found {'kind': 'infil'}, expected a name \(causal, .*t5\), or a mapping with kind: "
        r"denoise or"
    ),
    "{rate: 0.5}": (
        r"run.yaml:4: data.sources.0.objective: found {'rate': 0.5}, expected a name \(causal, "
        r"infill, masked_diffusion, block_diffusion, ul2"
    ),
    "[infill]": r"objective: found \['infill'\], expected a name",
    "{kind: infill, rat: 0.5}": r"run.yaml:4: data.sources.0.objective.rat: unknown key; did you mean 'rate'\?",  # noqa: E501
    "{kind: infill, rate: 1.5}": r"run.yaml:4: data.sources.0.objective: infill: rate must be a share from 0 to 1",  # noqa: E501
    "{kind: infill, rate: lots}": r"run.yaml:4: data.sources.0.objective.rate: found 'lots', expected a number",  # noqa: E501
    "{kind: infill, zzz: true}": r"objective.zzz: unknown key; known here: rate, spm_rate, .*kind",
    "{kind: infill, splitter: x}": r"objective.splitter: unknown key",
    "{kind: denoise}": (
        r"objective: denoising needs either tasks or a preset \(ul2, ul2r, t5\); found "
        r"neither"
    ),
    "{preset: ul2, tasks: [{kind: causal}]}": r"objective: denoising needs either tasks or a preset .*; found both",  # noqa: E501
    "{preset: t5, modes: {R: 3}}": r"objective: modes sets the mode tokens of the presets ul2 and ul2r",  # noqa: E501
    "{preset: ul4}": r"objective.preset: found 'ul4', expected 'ul2', 'ul2r' or 't5'",
    "{kind: denoise, tasks: [{kind: span}]}": r"tasks.0: found {'kind': 'span'}, expected a mapping with kind: spans",  # noqa: E501
    "{kind: denoise, tasks: []}": r"objective: Denoise: tasks is empty",
    TASKS.replace("mean: 3, mode", "meen: 3, mode"): (
        r"(?s)run.yaml:9: data.sources.0.objective.tasks.0.mean: missing; it is required: Mean "
        r"tokens of a span.*run.yaml:9: data.sources.0.objective.tasks.0.meen: unknown key; "
        r"did you mean 'mean'\?"
    ),
    TASKS.replace("0.15", "7"): r"run.yaml:9: data.sources.0.objective.tasks.0: rate is 7",
    TASKS.replace(
        "sentinel: false", "rates: 1"
    ): r"run.yaml:11: .*tasks.2.rates: unknown key; did you mean 'rate'\?",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_refused_with_their_place(load, text):
    with pytest.raises(ConfigError, match=MISTAKES[text]):
        load(text)


@pytest.mark.parametrize(
    "text",
    ["ul3", "{kind: infill, rat: 0.5}", "{rate: 0.5}", "{kind: denoise, tasks: [{kind: span}]}"],
)
def test_the_schema_refuses_it(text):
    with pytest.raises(jsonschema.ValidationError, match=r"objective|ul3|denoise|tasks"):
        jsonschema.validate(yaml.safe_load(FILE.format(text)), run_schema())
