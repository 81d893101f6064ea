"""Chats: preparing conversations against TRL, rendering against transformers, the boundary scan
against axolotl.

Preparing: CPU seconds from JSONL to tokens with loss weights, of both sides start-up not counted
(what a quarter of the conversations costs is taken off the whole); they must train as many tokens.
Ours also makes a certificate of each. Their text is Python's standard library, cut into questions
of about 240 characters and answers of 1,000.

Rendering: CPU time of `Template.render` over that of `apply_chat_template(tokenize=False)`, the
median over templates.

Trajectories: CPU time of `prompt` and `reply` for a turn in which a tool answers a call, with as
many turns before it as a conversation has on average; with the tokenizer's own template, if it has
one.

Traces: CPU time of encoding one conversation of calls and their results, by the number of calls,
with each template in `--templates` that takes them, or with ChatML alone.

The scan: nanoseconds a token, one core, 8 rows of 4,096 tokens as in axolotl's own test, with turns
as in ordinary conversations and very short ones. Both sides give one value a token: ours float32
weights, axolotl's a bool mask; they must train the same number of tokens.

    python benchmarks/bench_chat.py [--trl PYTHON] [--peers PYTHON] [--templates FOLDER]
    [--tokenizer FOLDER] [--turns] [--traces]

`--trl`: a Python with trl; `--peers`: one with axolotl (pip install --no-deps axolotl), torch and
transformers; `--templates`: a folder of .jinja files to be timed beside ours; `--tokenizer`: a
folder with a tokenizer.json that has <|im_start|> and <|im_end|>, else one is trained; `--turns`:
only trajectories; `--traces`: only traces.
"""

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from common import Peer, against, arguments, cpu_seconds, standard_library, table, take_turns
from penstock.chat.masks.boundaries import Boundary, resolve
from penstock.chat.masks.scanning import scan
from penstock.chat.render.template import own_template

TEMPLATES = {
    "ChatML": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if "
        "message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% "
        "endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' "
        "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif "
        "%}"
    ),
    "headers": (
        "{{ bos_token }}{% for message in messages %}{% set content = '<|start|>' + "
        "message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' %}{{ "
        "content }}{% endfor %}{% if add_generation_prompt %}{{ "
        "'<|start|>assistant<|end|>\\n\\n' }}{% endif %}"
    ),
    "instructions": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
}
"""Three shapes of real templates: markers around, a variable a message, no generation prompt."""
TURNS = (1, 6, 24)
"""Of the conversations of trajectories."""
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The documentation of a function.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}
ROWS, SLOTS, VOCABULARY = 8, 4096, 150_000
START, END, NEWLINE, IMAGE = 151_644, 151_645, 198, 151_655
HEADERS = {"user": [START, 872, NEWLINE], "assistant": [START, 77091, NEWLINE]}
CALLS = 20
"""Calls that one of our repeats times, because one call is too short for the clock."""


def conversations(question: float, answer: float) -> np.ndarray:
    """Rows of turns with lengths about those, int64 [ROWS, SLOTS]; ids as Qwen's, without its
    control tokens.
    """
    random = np.random.default_rng(0)
    rows = []
    for _ in range(ROWS):
        row: list[int] = []
        while len(row) < SLOTS:
            for role, mean in (("user", question), ("assistant", answer)):
                content = random.integers(1000, VOCABULARY, 1 + random.poisson(mean)).tolist()
                row += [*HEADERS[role], *content, END, NEWLINE]
        rows.append(row[:SLOTS])
    return np.array(rows, np.int64)


def scan_seconds(ids: np.ndarray, boundaries: object, **more: object) -> float:
    def work() -> None:
        for _ in range(CALLS):
            scan(ids, boundaries, **more)

    return cpu_seconds(work) / CALLS


def bench_scan(repeats: int, peers: str | None) -> None:
    boundaries = resolve([Boundary(role, start, [END]) for role, start in HEADERS.items()])
    mixes = {"ordinary turns": conversations(60, 250), "turns of 8 tokens": conversations(8, 8)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        declared = Path(folder) / "boundaries.json"
        declared.write_text(json.dumps([(role, start, [END]) for role, start in HEADERS.items()]))
        for name, ids in mixes.items():
            path = Path(folder) / f"{name.replace(' ', '_')}.npy"
            np.save(path, ids)
            stored = ids.astype(np.uint32)
            mask = np.arange(SLOTS) < np.linspace(SLOTS // 2, SLOTS, ROWS, dtype=int)[:, None]
            rivals = {
                "penstock, int64": lambda ids=ids: scan_seconds(ids, boundaries),
                "penstock, uint32": lambda ids=stored: scan_seconds(ids, boundaries),
                "penstock, padding and media": lambda ids=ids, mask=mask: scan_seconds(
                    ids, boundaries, attention_mask=mask, masked_ids=[IMAGE]
                ),
            }
            others = {}
            if peers:
                others = {
                    f"axolotl, {kind}": Peer(
                        peers, "axolotl_scan.py", str(path), str(declared), kind
                    )
                    for kind in ("reference", "vectorized")
                }
            seconds = take_turns(rivals | others, repeats)
            trained = int(scan(ids, boundaries).sum())
            for kind, other in others.items():
                assert other.last["trained"] == trained, (kind, other.last, trained)
            ours = seconds["penstock, int64"]
            for rival, spent in seconds.items():
                against = "" if rival.startswith("penstock") else f"{spent / ours:.0f} × ours"
                rows.append((f"{name}: {rival}", f"{spent / ids.size * 1e9:.2f} ns", against))
    table(f"Role boundaries: a token of {ROWS} × {SLOTS}", rows)


def write_chats(path: Path, pairs: int) -> None:
    """Conversations of one to four questions with their answers, until there are so many pairs;
    text never repeats.
    """
    text, at, random = "\n".join(standard_library(pairs * 1300)), 0, np.random.default_rng(0)

    def take(mean: int) -> str:
        nonlocal at
        begin, at = at, at + 1 + int(random.poisson(mean))
        return text[begin:at].strip() or "?"

    with open(path, "w", encoding="utf-8") as file:
        while pairs > 0:
            count = min(int(random.integers(1, 5)), pairs)
            turns = [(take(240), take(1000)) for _ in range(count)]
            messages = [
                {"role": role, "content": content}
                for turn in turns
                for role, content in zip(("user", "assistant"), turn, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
            pairs -= count


def children_seconds(code: str, *arguments: str) -> float:
    """CPU seconds of a child process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


PREPARE = """
import sys
import penstock
chats, tokenizer, template, output = sys.argv[1:]
penstock.prepare(chats, tokenizer=tokenizer, template=template, output=output, processes=1, progress=False)
"""  # noqa: E501


def bench_prepare(folder: Path, tokenizer: Path, trl: str | None, repeats: int) -> None:
    template = folder / "chatml.jinja"
    template.write_text(TEMPLATES["ChatML"], encoding="utf-8")
    sizes = {"few": 3000, "many": 12_000}
    for name, pairs in sizes.items():
        write_chats(folder / f"{name}.jsonl", pairs)
    lines = {
        name: (folder / f"{name}.jsonl").read_text(encoding="utf-8").count("\n") for name in sizes
    }
    conversations = lines["many"] - lines["few"]

    def ours(name: str) -> float:
        output = folder / "out" / name
        shutil.rmtree(output, ignore_errors=True)
        return children_seconds(
            PREPARE, str(folder / f"{name}.jsonl"), str(tokenizer), str(template), str(output)
        )

    rivals = {f"penstock {name}": lambda name=name: ours(name) for name in sizes}
    peers = {}
    if trl:
        vocabulary = str(tokenizer / "tokenizer.json")
        peers = {
            f"TRL {name}": Peer(
                trl, "trl_chat.py", str(folder / f"{name}.jsonl"), vocabulary, str(template)
            )
            for name in sizes
        }
    seconds = take_turns(rivals | peers, repeats)
    spent = {
        who: seconds[f"{who} many"] - seconds[f"{who} few"]
        for who in (["penstock", "TRL"] if trl else ["penstock"])
    }
    trained = int(ps.Dataset.open(folder / "out" / "many").manifest.trained_tokens)
    rows = [
        (who, f"{conversations / time:,.0f} /s", f"{time / conversations * 1e6:.0f} us each")
        for who, time in spent.items()
    ]
    if trl:
        assert peers["TRL many"].last["trained"] == trained, (peers["TRL many"].last, trained)
        rows.append(("penstock / TRL", f"{spent['TRL'] / spent['penstock']:.1f}", "due: >= 5"))
        times = {"ours": spent["penstock"], "theirs": spent["TRL"]}
        against("Chats and tokenizers", "prepare chats, certificates included", "TRL", **times)
    table(f"{conversations} conversations prepared, a CPU second", rows)


def bench_render(folder: Path, tokenizer: Path, more: str | None, repeats: int) -> None:
    from transformers import PreTrainedTokenizerFast

    sources = dict(TEMPLATES)
    if more:
        sources |= {
            path.stem: path.read_text(encoding="utf-8")
            for path in sorted(Path(more).rglob("*.jinja"))
        }
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    write_chats(folder / "render.jsonl", 20)
    lines = (folder / "render.jsonl").read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    ratios, rows = [], []
    for name, source in sources.items():
        template = ps.chat.load_template(
            source, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        try:
            template.render(chats[0])
        except ps.PenstockError:
            continue
        rivals = {
            "penstock": lambda template=template: cpu_seconds(
                lambda: [template.render(chat) for chat in chats]
            ),
            "transformers": lambda source=source: cpu_seconds(
                lambda: [
                    theirs.apply_chat_template(chat, chat_template=source, tokenize=False)
                    for chat in chats
                ]
            ),
        }
        seconds = take_turns(rivals, repeats)
        ratios.append(seconds["penstock"] / seconds["transformers"])
        if name in TEMPLATES:
            rows.append(
                (
                    name,
                    f"{seconds['penstock'] / len(chats) * 1e6:.0f} us",
                    f"{ratios[-1]:.2f} x transformers",
                )
            )
    over = sum(ratio > 2 for ratio in ratios)
    rows.append(
        (
            f"median of {len(ratios)} templates",
            f"{statistics.median(ratios):.2f}",
            f"due: <= 2; {over} are over 2",
        )
    )
    work, median = (
        "render a chat; ours with the origin of each character",
        statistics.median(ratios),
    )
    against("Chats and tokenizers", work, "transformers' plain rendering", ours=median, theirs=1.0)
    table("Rendering with provenance, a conversation", rows)


def bench_turns(folder: Path, repeats: int) -> None:
    tokenizer = ps.load_tokenizer(folder)
    try:
        template = own_template(tokenizer)
    except ps.PenstockError:
        template = ps.chat.load_template(TEMPLATES["ChatML"], tokenizer=tokenizer)
    text = "\n".join(standard_library(40_000))
    call = {"name": "look_up", "arguments": {"name": "json.dumps"}}
    said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    ids = [*tokenizer.encode(said).tolist(), tokenizer.special_tokens["<|im_end|>"]]
    logs = [-0.5] * len(ids)

    def converse(turns: int, history: Any) -> None:
        trajectory = ps.chat.Trajectory(tokenizer, template, tools=[LOOK_UP], history=history)
        new = [{"role": "user", "content": "What does json.dumps do?"}]
        for turn in range(turns):
            trajectory.prompt(new)
            trajectory.reply(ids, logs, finish_reason="stop")
            new = [{"role": "tool", "content": text[turn * 400 : turn * 400 + 400]}]

    rows = []
    for history in ("sampled", "template"):
        rivals = {
            f"{history}, {turns} turns": lambda turns=turns, history=history: (
                # As many turns each time, because one is too short for the clock.
                cpu_seconds(lambda: [converse(turns, history) for _ in range(TURNS[-1] // turns)])
                / TURNS[-1]
            )
            for turns in TURNS
        }
        spent = take_turns(rivals, repeats)
        rows += [(name, f"{seconds * 1e6:.0f} us", "") for name, seconds in spent.items()]
    table(f"A turn of a trajectory, {template.name}", rows)


def trace(calls: int) -> dict[str, Any]:
    """A question, calls with their results, and an answer."""
    text = "\n".join(standard_library(500_000))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What does json do?"}]
    for number in range(calls):
        function = {"name": "look_up", "arguments": {"name": f"json.{number}"}}
        one = {"id": f"call{number:05d}", "type": "function", "function": function}
        found = text[number * 400 : number * 400 + 400]
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [one]},
            {"role": "tool", "name": "look_up", "tool_call_id": one["id"], "content": found},
        ]
    answer = {"role": "assistant", "content": "It reads and writes JSON."}
    return {"messages": [*messages, answer], "tools": [LOOK_UP]}


def bench_traces(folder: Path, more: str | None, repeats: int) -> None:
    tokenizer, rows = ps.load_tokenizer(folder), []
    files = sorted(Path(more).rglob("*.jinja")) if more else []
    sources = {path.stem: path.read_text(encoding="utf-8") for path in files}
    chats = {calls: ps.chat.read_conversation(trace(calls)) for calls in (100, 200, 400, 800)}
    for name, source in (sources or {"ChatML": TEMPLATES["ChatML"]}).items():
        template = ps.chat.load_template(source, tokenizer=tokenizer)
        encoder = ps.chat.ChatEncoder(tokenizer, template)
        try:
            encoder.encode(chats[100])
        except ps.PenstockError:
            continue
        rivals = {
            str(calls): lambda chat=chat, encoder=encoder: cpu_seconds(lambda: encoder.encode(chat))
            for calls, chat in chats.items()
        }
        spent = take_turns(rivals, repeats)
        ratio = (
            f"{spent['400'] / spent['200']:.2f} x as long as 200; 800 "
            f"{spent['800'] / spent['400']:.2f} x as long as 400"
        )
        rows.append((name, f"{spent['400'] / 400 * 1e3:.2f} ms", ratio))
    table("A call of a trace with 400", rows)


def tokenizer_folder(folder: Path, given: str | None) -> Path:
    if given:
        return Path(given)
    texts = standard_library(2_000_000)
    ps.train_tokenizer(
        texts,
        vocab_size=8192,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        output=folder / "tokenizer",
        progress=False,
    )
    return folder / "tokenizer"


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--trl", metavar="PYTHON", help="a Python in which trl is installed")
    parser.add_argument("--templates", metavar="FOLDER", help="more templates to render")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="with <|im_start|> and <|im_end|>; else one is trained",
    )
    parser.add_argument("--turns", action="store_true", help="only turns of trajectories")
    parser.add_argument("--traces", action="store_true", help="only traces of calls")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tokenizer = tokenizer_folder(Path(name), options.tokenizer)
        if options.traces:
            bench_traces(tokenizer, options.templates, options.repeats)
            sys.exit()
        bench_turns(tokenizer, options.repeats)
        if options.turns:
            sys.exit()
        bench_prepare(Path(name), tokenizer, options.trl, options.repeats)
        bench_render(Path(name), tokenizer, options.templates, options.repeats)
    bench_scan(options.repeats, options.peers)
