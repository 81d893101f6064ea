"""What the pictures show: conversations about water, made here, the same on every machine, and runs
that learn them.
"""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import penstock as ps

THINGS = {
    "penstock": "A pipe that leads water under pressure to a turbine.",
    "weir": "A low wall across a river that raises its water.",
    "sluice": "A gate that lets water in or holds it back.",
    "turbine": "A wheel with blades that running water turns.",
    "headrace": "The channel that brings water to the wheel.",
    "tailrace": "The channel that takes the water away again.",
    "spillway": "The way out for more water than a dam may hold.",
    "forebay": "The basin at the upper end of a penstock.",
    "flume": "An open channel of boards that carries water.",
    "culvert": "A tunnel for a stream under a road.",
    "millpond": "The pond that keeps water for a mill.",
    "canal": "A river that people have dug.",
    "levee": "A bank of earth that keeps a river in its bed.",
    "surge tank": "A shaft that takes the shock when a valve shuts.",
}
QUESTIONS = ("What is a {}?", "Tell me what a {} is.", "What does {} mean?")
LATER = ("And a {}?", "What about a {}?")
CONTROLS = ["<|im_start|>", "<|im_end|>"]
SYSTEM = "You know about water, and answer in one sentence."
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "level",
        "description": "The level of a river.",
        "parameters": {
            "type": "object",
            "properties": {"river": {"type": "string"}},
            "required": ["river"],
        },
    },
}
RIVERS = {"Aare": 431, "Inn": 388, "Rhône": 274, "Salzach": 512}
CHATML_WITH_TOOLS = Path(__file__).parents[1] / "chat.jinja"
LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
THOUGHTS = (
    "{% if message.reasoning_content and loop.index0 > ns.last %}<think>\n"
    "{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content or '' }}"
)
"""Thoughts stay until the next message of a user."""
RATES = {"rate-3e-3": 3e-3, "rate-1e-3": 1e-3, "rate-3e-4": 3e-4}
STEPS = 160


def conversations(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Questions and answers; some with a system message, some with a function that the assistant
    calls.
    """
    draw = random.Random(seed)
    for number in range(count):
        if number % 5 == 3:
            yield called(draw)
            continue
        messages = [{"role": "system", "content": SYSTEM}] if number % 3 == 0 else []
        for place, thing in enumerate(draw.sample(list(THINGS), draw.choice((1, 2, 2, 3)))):
            asked = draw.choice(LATER if place else QUESTIONS).format(thing)
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": THINGS[thing]},
            ]
        yield {"messages": messages}


def called(draw: random.Random) -> dict[str, Any]:
    """A conversation in which a function is called."""
    river, level = draw.choice(list(RIVERS.items()))
    call = {"type": "function", "function": {"name": "level", "arguments": {"river": river}}}
    messages = [
        {"role": "user", "content": f"How high is the {river} today?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{level} cm"},
        {"role": "assistant", "content": f"The {river} stands at {level} centimetres."},
    ]
    return {"messages": messages, "tools": [LOOK_UP]}


def rankings() -> Iterator[dict[str, Any]]:
    """A question with four answers that begin alike, the best one first."""
    for thing, good in THINGS.items():
        words = good.rstrip(".").split()
        middle = len(words) // 2
        worse = [
            " ".join(words[:middle]) + " nobody knows.",
            good[:-1] + ", or so I think.",
            " ".join(words[:2]) + " thing.",
        ]
        yield {
            "prompt": QUESTIONS[0].format(thing),
            "responses": [good, *worse],
            "scores": [4, 1, 3, 2],
        }


def trajectories(engine: Any, tokenizer: Any) -> Iterator[ps.chat.FinishedTrajectory]:
    """Two answers to one question: one looks the level up and is asked once more, before which its
    template drops the thought; the other was cut by a limit, and is masked. The words are given,
    their log-probabilities are those of a model.
    """
    source = CHATML_WITH_TOOLS.read_text(encoding="utf-8").replace(
        '{{ message.content or "" }}', THOUGHTS
    )
    template = ps.chat.Template(source=LAST_USER + source, name="thoughts")
    looks = '<think>\nI look it up.\n</think>\n\n<call>level {"river": "Aare"}</call><|im_end|>'
    asked = ("user", "How high is the Aare?")
    said = [
        (asked, looks),
        (("tool", "431 cm"), "The Aare stands at 431 centimetres.<|im_end|>"),
        (("user", "And what is a weir?"), f"{THINGS['weir']}<|im_end|>"),
    ]
    for steps, mask, cut in ((said, 1.0, False), ([(asked, "The Aare stands at 388")], 0.0, True)):
        trajectory = ps.chat.Trajectory(tokenizer, template, tools=[LOOK_UP], history="template")
        for (role, content), reply in steps:
            prompt = trajectory.prompt([{"role": role, "content": content}])
            ids = tokenizer.encode(reply, allow_control=True).tolist()
            logs = [one.token for one in engine.score([*prompt, *ids], 1)][len(prompt) - 1 :]
            trajectory.reply(
                ids, logs, finish_reason="length" if cut else "stop", weights=[mask] * len(ids)
            )
        yield trajectory.finish(reward=mask, advantage=mask - 0.5, group="aare")


def write(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    return path


def words_of(count: int) -> list[str]:
    """All texts of conversations, to train tokenizers on."""
    return [
        message["content"]
        for record in conversations(count)
        for message in record["messages"]
        if message["content"]
    ] + [
        "system user assistant tool",
        '<call>level {"river": "Aare"}</call>',
        LOOK_UP["function"]["description"],
    ]  # type: ignore[index]


def make_data(folder: Path) -> None:
    """Conversations, a tokenizer, and datasets, in the current folder's `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    chats = write(folder / "chats.jsonl", conversations(400))
    write(folder / "rankings.jsonl", rankings())
    ps.train_tokenizer(
        words_of(400),
        vocab_size=512,
        special_tokens=CONTROLS,
        output=folder / "tokenizer",
        overwrite=True,
    )
    other = [f"{text} {number * 37 % 1000}" for number, text in enumerate(words_of(200))]
    ps.train_tokenizer(
        other, vocab_size=900, special_tokens=CONTROLS, output=folder / "teacher", overwrite=True
    )
    write(folder / "texts.jsonl", ({"text": text} for text in other[::3]))
    common: dict[str, Any] = {
        "tokenizer": folder / "tokenizer",
        "template": CHATML_WITH_TOOLS,
        "progress": False,
    }
    ps.prepare(chats, output=folder / "chats", overwrite=True, **common)
    ps.prepare(
        write(folder / "held.jsonl", conversations(40, 1)),
        output=folder / "held",
        overwrite=True,
        **common,
    )
    ps.prepare(
        folder / "rankings.jsonl",
        output=folder / "rankings",
        answers="tree",
        overwrite=True,
        **common,
    )


def make_runs(folder: Path) -> None:
    """Three runs with three rates of learning; a run that is there and whole is kept."""
    for name, rate in RATES.items():
        loader = ps.Loader({folder / "chats": 1.0}, sequence_length=256, rows_per_step=8, seed=3)
        ps.train(
            ps.build_model(layers=2, width=128, heads=4, vocab_size=512, seed=1),
            loader,
            steps=STEPS,
            learning_rate=rate,
            output=folder / name,
            resume=True,
            progress=False,
            evaluators={"held": {"kind": "loss", "data": str(folder / "held"), "every": 20}},
        )


def make_shapes(folder: Path) -> None:
    """Conversations with small pictures, by `examples/shapes.py`."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import shapes

    shapes.write_chats(folder / "shapes", 24, 5)
    shapes.make_processor(folder / "shapes")
    processor = folder / "shapes" / "processor"
    ps.prepare(
        folder / "shapes" / "chats.jsonl",
        tokenizer=processor,
        processor=processor,
        template="auto",
        output=folder / "pictures",
        overwrite=True,
        progress=False,
    )
