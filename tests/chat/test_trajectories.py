"""Trajectories: prompts go on behind sampled ids, for templates of every kind; each trap that peers
fell into has a test.
"""

import json
from collections import Counter
from random import Random

import pytest
from chat_makers import TOKENS, TOOLS, make_tokenizer, markers_of
from trajectory_walks import HISTORIES, outcomes, split

import penstock as ps
from makers.tokenizers import CHATML, added_token
from penstock.chat.render.template import Template, load_template, template_names
from penstock.chat.trajectories import trajectory as module
from penstock.chat.trajectories.trajectory import Trajectory
from penstock.core.errors import ConfigError, ConversationError

ASKED = [{"role": "user", "content": "What is 6 times 7?"}]
MORE = [{"role": "user", "content": "And 2?"}]
GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}"
    "<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS_LAST = (
    "{% for m in messages %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|start|>",
            "<|message|>", "<|user|>", "<|assistant|>", "<|observation|>", "<tool_call>",
            "</tool_call>", "<think>", "</think>"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trajectories")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return make_tokenizer(folder, CONTROLS, eos="<|im_end|>")


def ids_of(tokenizer, text):
    return tokenizer.encode(text, allow_control=True).tolist()


def says(trajectory, *replies, new=MORE, **options):
    """The text of the prompt after some replies."""
    trajectory.prompt(ASKED)
    for place, text in enumerate(replies):
        if place:
            trajectory.prompt(new)
        sampled = ids_of(trajectory.tokenizer, text)
        trajectory.reply(sampled, [-0.5] * len(sampled), **options)
    prompt = trajectory.prompt(new)
    return trajectory._texts.text(prompt)[0]


def tail(trajectory, reply, **options):
    """What is written behind a reply."""
    whole = says(trajectory, reply, **options)
    return whole[whole.index(reply) + len(reply) :]


# -- all templates


@pytest.mark.parametrize("name", template_names())
def test_templates_that_come_with_penstock(name, folder):
    tokenizer = make_tokenizer(folder, markers_of(load_template(name).source))
    template = load_template(name, tokenizer=tokenizer)
    found = Counter(came.split(":")[0] for _, came in outcomes(tokenizer, template, 1))
    assert not [one for one in found if one.startswith("WRONG")], found
    assert found["exact"] >= 4


@pytest.mark.real_data
def test_templates_of_real_models(real_data, folder):
    found: Counter[tuple[str, str]] = Counter()
    wrong = []
    for path in sorted(real_data.joinpath("chat_templates").glob("*/*.jinja")):
        source = path.read_text(encoding="utf-8")
        template = Template(source=source, name=path.stem, variables=TOKENS)
        controls = markers_of(source)
        eos = "<|return|>" if "<|return|>" in controls else "</s>"
        tokenizer = make_tokenizer(folder, controls, eos=eos)
        for (history, *rest), came in outcomes(tokenizer, template, 1):
            found[history, came.split(":")[0].split(" ")[0]] += 1
            if came.startswith("WRONG"):
                wrong.append((path.stem, history, *rest, came))
            if came.startswith("refused"):
                assert "again behind message" in came, came
                assert history == "sampled"
    assert not wrong, wrong
    assert found["sampled", "exact"] > 450
    assert found["template", "exact"] + found["template", "branches"] > 500
    assert found["tool_cycle", "exact"] + found["tool_cycle", "branches"] > 500


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("vocabulary", "templates"),
    [
        ("hf_derived/qwen2.5", "*Qwen*2.5*"),
        ("hf_derived/qwen2.5", "qwen3*"),
        ("hf/phi-3-mini", "*hi*3*"),
        ("spm/mistral-v3.model", "*istral*"),
    ],
)
def test_real_vocabularies(vocabulary, templates, real_data):
    """Unicode's normal form; SentencePiece, whose control tokens take white space and add some."""
    tokenizer = ps.load_tokenizer(real_data / "tokenizers" / vocabulary)
    names = {token: text for text, token in tokenizer.special_tokens.items()}
    variables = {"bos_token": names.get(tokenizer.bos_id, ""), "eos_token": names[tokenizer.eos_id]}
    found: Counter[str] = Counter()
    for path in sorted(real_data.joinpath("chat_templates").glob(f"*/{templates}.jinja")):
        source = path.read_text(encoding="utf-8")
        template = Template(source=source, name=path.stem, variables=variables)
        for key, came in outcomes(tokenizer, template, 1):
            assert not came.startswith("WRONG"), (path.stem, key, came)
            found[came.split(" ")[0].split(":")[0]] += 1
    assert found["exact"] > 20, found


# -- traps


def test_a_newline_behind_the_stop_token_is_sent(tokenizer):
    trajectory = Trajectory(tokenizer, CHATML)
    assert tail(trajectory, "It is 42.<|im_end|>").startswith("\n<|im_start|>user\nAnd 2?")


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_stop_token_that_opens_the_next_turn_is_not_sent_twice(role, tokenizer):
    opener = {"user": "<|user|>", "tool": "<|observation|>"}[role]
    trajectory = Trajectory(tokenizer, GLM)
    found = tail(trajectory, f"\nIt is 42.{opener}", new=[{"role": role, "content": "And 2?"}])
    assert found == "\nAnd 2?<|assistant|>\n"
    # It is sampled, so it is trained.
    [path] = trajectory.paths()
    assert path.ids[-1] == tokenizer.special_tokens[opener]
    assert path.weights[-1] == 1


@pytest.mark.parametrize(("stops", "reason"), [(("<|return|>",), None), ((), "stop")])
def test_another_stop_token_than_the_history_has_ends_the_turn_once(stops, reason, tokenizer):
    ids = [tokenizer.special_tokens[one] for one in stops]
    trajectory = Trajectory(tokenizer, HARMONY, stop_ids=ids)
    found = tail(trajectory, "It is 42.<|return|>", finish_reason=reason)
    assert found.startswith("<|start|>user<|message|>And 2?")


@pytest.mark.parametrize("reason", ["length", "stop", None])
def test_a_control_token_inside_a_turn_is_no_end(reason, tokenizer):
    trajectory = Trajectory(tokenizer, CALLS, tools=TOOLS)
    reply = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
        ],
    }
    found = tail(trajectory, reply, finish_reason=reason, message=message)
    assert found.startswith("<|im_end|>\n<|im_start|>user")


def test_white_space_that_a_control_token_takes_has_no_token_of_its_own(folder):
    make_tokenizer(folder, ["<s>", "</s>"], eos="</s>")
    parsed = json.loads((folder / "base" / "tokenizer.json").read_text())
    start = 1 + max(parsed["model"]["vocab"].values())
    parsed["added_tokens"] = [
        added_token(text, start + place) | {"rstrip": text == "<|end|>"}
        for place, text in enumerate(["<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>"])
    ]
    place = folder / "takes"
    place.mkdir()
    (place / "tokenizer.json").write_text(json.dumps(parsed))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = ps.load_tokenizer(place)
    source = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    trajectory = Trajectory(tokenizer, source)
    trajectory.prompt(ASKED)
    sampled = ids_of(tokenizer, "It is 42.<|end|>")
    trajectory.reply(sampled)
    prompt = list(trajectory.prompt(MORE))
    sent = "<|user|>\nWhat is 6 times 7?<|end|>\n<|assistant|>\nIt is 42.<|end|>\n"
    assert prompt == ids_of(tokenizer, sent + "<|user|>\nAnd 2?<|end|>\n<|assistant|>\n")
    # The entry takes the newline, so a newline of its own would be there twice.
    assert ids_of(tokenizer, "<|end|>\n") == ids_of(tokenizer, "<|end|>")


def test_thoughts_that_the_template_drops(tokenizer):
    reply = "I think.\n</think>\n\nIt is 42.<|im_end|>"
    kept = Trajectory(tokenizer, THINKS)
    assert "<think>\nI think.\n</think>\n\nIt is 42.<|im_end|>\n<|im_start|>user" in says(
        kept, reply
    )
    assert kept.steps[-1].kind == "extends"
    assert "would rewrite" in kept.steps[-1].why
    assert kept.messages[1]["reasoning_content"] == "I think."
    dropped = Trajectory(tokenizer, THINKS, history="template")
    assert "I think." not in says(dropped, reply)
    assert dropped.steps[-1].kind == "branch"
    assert "<think>" in dropped.steps[-1].why
    # Each sampled token is trained once, in the path where it was sampled.
    assert [path.replies for path in dropped.paths()] == [(0,)]


def test_a_tool_cycle_keeps_thoughts_until_the_user_speaks(tokenizer):
    trajectory = Trajectory(tokenizer, THINKS, history="tool_cycle")
    reply = ids_of(tokenizer, "I think.\n</think>\n\nLook.<|im_end|>")
    trajectory.prompt(ASKED)
    trajectory.reply(reply)
    trajectory.prompt([{"role": "tool", "content": "42"}])
    trajectory.reply(reply)
    trajectory.prompt(MORE)
    assert [step.kind for step in trajectory.steps] == ["first", "extends", "branch"]
    assert trajectory._texts.text(trajectory.ids)[0].count("I think.") == 0


def test_arguments_that_the_template_writes_in_another_way(tokenizer):
    written = '{"arguments": {"days":0, "city": "\\u00e9"}, "name": "get_weather"}'
    call = f"<tool_call>\n{written}\n</tool_call>"
    for history, kind in (("sampled", "extends"), ("template", "branch")):
        trajectory = Trajectory(tokenizer, CALLS, tools=TOOLS, history=history)
        assert (call in says(trajectory, call + "<|im_end|>")) == (history == "sampled")
        assert trajectory.messages[1]["tool_calls"][0]["function"]["name"] == "get_weather"
        assert trajectory.steps[-1].kind == kind


def test_a_template_that_always_writes_its_prompt(tokenizer):
    source = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
    assert source != CHATML
    found = tail(Trajectory(tokenizer, source), "It is 42.<|im_end|>")
    assert found == "\n<|im_start|>user\nAnd 2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_ends_a_text_with_eos_where_it_asks_for_no_reply(tokenizer):
    """Phi-3 as it is trained: a render without the prompt is not how the one with it begins."""
    source = CHATML + "{% if not add_generation_prompt %}</s>{% endif %}"
    for history in HISTORIES:
        trajectory = Trajectory(tokenizer, source, history=history)
        found = tail(trajectory, "It is 42.<|im_end|>")
        assert found == "\n<|im_start|>user\nAnd 2?<|im_end|>\n<|im_start|>assistant\n"
        assert trajectory.steps[-1].kind == "extends"


def test_a_control_token_that_closes_thoughts_is_no_terminator(tokenizer):
    """GLM's turns have no terminator, so one without words ends with the end of its thoughts."""
    thinks = "<think>{{ m.reasoning_content }}</think>{{ m.content }}"
    source = GLM.replace(
        "{{ m.content }}{% endif %}{% endfor %}",
        "{% if m.role == 'assistant' %}" + thinks + "{% else %}{{ m.content }}{% endif %}"
        "{% endif %}{% endfor %}",
    )
    assert thinks in source
    trajectory = Trajectory(tokenizer, source)
    message = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    # Cut inside its thoughts, which are written otherwise.
    found = tail(trajectory, "<think>\nHm.", message=message, finish_reason="length")
    assert found == "<|user|>\nAnd 2?<|assistant|>\n"


def test_another_normal_form_is_no_other_history(folder):
    """Ids are compared, not texts: an e and an accent are two tokens in either form."""
    make_tokenizer(folder, ["<s>", "</s>"], eos="</s>")
    parsed = json.loads((folder / "base" / "tokenizer.json").read_text(encoding="utf-8"))
    start = 1 + max(parsed["model"]["vocab"].values())
    names = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    parsed["added_tokens"] = [added_token(one, start + place) for place, one in enumerate(names)]
    parsed["normalizer"] = {"type": "NFC"}
    place = folder / "normal"
    place.mkdir()
    (place / "tokenizer.json").write_text(json.dumps(parsed), encoding="utf-8")
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = ps.load_tokenizer(place)
    # The message says the composed letter, and so do the ids of the text that was sampled.
    sampled = ids_of(tokenizer, "Cafe\u0301<|im_end|>")
    assert sampled == ids_of(tokenizer, "Caf\u00e9<|im_end|>")
    trajectory = Trajectory(tokenizer, CHATML, history="template")
    trajectory.prompt(ASKED)
    trajectory.reply(sampled, message={"role": "assistant", "content": "Cafe\u0301"})
    trajectory.prompt(MORE)
    assert trajectory.steps[-1].kind == "extends"
    assert trajectory.certificate.ok


def test_tokens_that_the_encoder_would_not_choose_are_kept(tokenizer):
    for history in HISTORIES:
        trajectory = Trajectory(tokenizer, CHATML, history=history)
        trajectory.prompt(ASKED)
        usual = ids_of(tokenizer, "It is warm, forty-two.<|im_end|>")
        sampled = split(tokenizer, Random(0), usual, 1.0)
        assert len(sampled) > len(usual)
        trajectory.reply(sampled, [-1.0] * len(sampled))
        prompt = trajectory.prompt(MORE)
        assert trajectory.steps[-1].kind == "extends"
        [path] = trajectory.paths()
        begin = path.begins[0]
        assert path.ids[begin:].tolist() == sampled
        assert list(prompt[begin : begin + len(sampled)]) == sampled
        assert path.log_probabilities[begin:].tolist() == [-1.0] * len(sampled)


def test_a_call_that_was_cut_is_no_call(tokenizer):
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
    for reason, calls in (("length", 0), ("stop", 1)):
        trajectory = Trajectory(tokenizer, CALLS, tools=TOOLS)
        trajectory.prompt(ASKED)
        ids = ids_of(tokenizer, text + ("" if reason == "length" else "</tool_call><|im_end|>"))
        message = trajectory.reply(ids, finish_reason=reason)
        assert len(message.get("tool_calls", ())) == calls
        assert ("<tool_call>" in message["content"]) == (not calls)


def test_a_form_that_was_right_is_tried_first(tokenizer, monkeypatch):
    """Each form costs a render of the whole conversation, in every turn."""
    trajectory = Trajectory(tokenizer, Template(source=CALLS), tools=TOOLS)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
    sizes, render = [], Template.render

    def counts(self, messages, **options):
        if options.get("add_generation_prompt"):
            sizes.append(len(messages))
        return render(self, messages, **options)

    monkeypatch.setattr(Template, "render", counts)
    for new in (ASKED, *([{"role": "tool", "content": "3"}] for _ in range(3))):
        trajectory.prompt(new)
        trajectory.reply(ids_of(tokenizer, call), finish_reason="stop")
    counted = Counter(sizes)
    # In the first turn with a call the arguments are tried as text, then as an object.
    assert [counted[size] for size in (1, 3, 5, 7)] == [1, 2, 1, 1]


def test_texts_become_parts_once_a_template_wants_them(tokenizer):
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for p in m.content %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found = says(Trajectory(tokenizer, source), "It is 42.<|im_end|>")
    assert found == (
        "<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n"
        "<|im_start|>assistant\nIt is 42.<|im_end|>\n"
        "<|im_start|>user\nAnd 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_reply_cut_inside_a_character_keeps_its_bytes(tokenizer):
    whole = split(tokenizer, Random(0), ids_of(tokenizer, "é"), 1.0)
    assert len(whole) == 2
    for history, kind in (("sampled", "extends"), ("template", "branch")):
        trajectory = Trajectory(tokenizer, CHATML, history=history)
        trajectory.prompt(ASKED)
        trajectory.reply(whole[:1], finish_reason="length")
        trajectory.prompt(MORE)
        assert trajectory.steps[-1].kind == kind
        assert trajectory.paths()[0].ids[-1] == whole[0]


def test_tools_behind_the_reply_are_refused(tokenizer):
    trajectory = Trajectory(tokenizer, TOOLS_LAST, tools=TOOLS)
    trajectory.prompt(ASKED)
    trajectory.reply(ids_of(tokenizer, "It is 42.<|im_end|>"))
    with pytest.raises(
        ConversationError, match=r"writes the tools again behind message 1.*template"
    ):
        trajectory.prompt(MORE)
    # Nothing has changed.
    assert len(trajectory.messages) == 2
    other = Trajectory(tokenizer, TOOLS_LAST, tools=TOOLS, history="template")
    assert "[/TOOLS]<|im_start|>user\nAnd 2?" in says(other, "It is 42.<|im_end|>")


@pytest.mark.real_data
def test_other_bytes_with_the_same_ids(real_data):
    """Qwen 2.5 normalises text: a sampled e and an accent are not what their text is encoded to."""
    tokenizer = ps.load_tokenizer(real_data / "tokenizers" / "hf_derived" / "qwen2.5")
    singles = split(tokenizer, Random(0), tokenizer.encode("Cafe\u0301").tolist(), 1.0)
    end = tokenizer.special_tokens["<|im_end|>"]
    for history in HISTORIES:
        trajectory = Trajectory(tokenizer, CHATML, history=history)
        trajectory.prompt(ASKED)
        trajectory.reply([*singles, end])
        trajectory.prompt(MORE)
        assert trajectory.certificate.ok
        composed = tokenizer.encode("Caf\u00e9").tolist()
        again = Trajectory(tokenizer, CHATML, history=history)
        again.prompt(ASKED)
        again.reply([*composed, end], message={"role": "assistant", "content": "Cafe\u0301"})
        again.prompt(MORE)
        assert again.steps[-1].kind == "extends"


# -- what is refused


def test_wrong_calls_are_named(tokenizer):
    trajectory = Trajectory(tokenizer, CHATML)
    with pytest.raises(ConfigError, match="no prompt that waits"):
        trajectory.reply([1])
    with pytest.raises(ConfigError, match="at least one new message"):
        trajectory.prompt([])
    trajectory.prompt(ASKED)
    with pytest.raises(ConfigError, match=r"no reply yet; call reply\(\)"):
        trajectory.prompt(MORE)
    for given, said in (
        (([1, 2], [-1.0]), "1 log-probabilities for 2 tokens"),
        (([10**6], [-1.0]), "id 1000000 is not in the vocabulary"),
        (([1], [float("nan")]), "log-probability of token 0 is nan"),
        (([1], [0.5]), "log-probability of token 0 is 0.5"),
    ):
        with pytest.raises(ConfigError, match=said):
            trajectory.reply(*given)
    with pytest.raises(ConfigError, match="weight of token 0 is -1"):
        trajectory.reply([1], weights=[-1])
    with pytest.raises(ConfigError, match="role 'user'; expected assistant"):
        trajectory.reply([1], message=ASKED[0])
    trajectory.reply(ids_of(tokenizer, "It is 42.<|im_end|>"), finish_reason="stop")
    with pytest.raises(ConversationError, match=r"message 0 is a reply.*reply\(\)"):
        trajectory.prompt([{"role": "assistant", "content": "mine"}])
    with pytest.raises(ConfigError, match="history must be one of sampled, template, tool_cycle"):
        Trajectory(tokenizer, CHATML, history="all")
    with pytest.raises(ConfigError, match="stop id 5 is no control token"):
        Trajectory(tokenizer, CHATML, stop_ids=[5])


def test_media_are_refused(tokenizer):
    image = {"type": "image", "path": "cat.png"}
    with pytest.raises(ConversationError, match="image"):
        Trajectory(tokenizer, CHATML).prompt([{"role": "user", "content": [image]}])


def test_a_prompt_that_spells_something_else_is_refused(tokenizer, monkeypatch):
    trajectory = Trajectory(tokenizer, CHATML)
    trajectory.prompt(ASKED)
    trajectory.reply(ids_of(tokenizer, "It is 42.<|im_end|>"))
    right = module.encode_behind
    monkeypatch.setattr(module, "encode_behind", lambda *given: right(*given)[:-2])
    with pytest.raises(ConversationError, match="its ids spell"):
        trajectory.prompt(MORE)


def test_a_token_that_is_trained_twice_or_changed_is_seen(tokenizer):
    trajectory = Trajectory(tokenizer, THINKS, history="template")
    for new in (ASKED, MORE):
        trajectory.prompt(new)
        trajectory.reply(ids_of(tokenizer, "Hm.\n</think>\n\nIt is 42.<|im_end|>"))
    first, second = trajectory.paths()
    assert trajectory.certificate.ok
    assert "each unchanged and trained once" in str(trajectory.certificate)
    assert (first.replies, second.replies) == ((0,), (1,))
    trajectory._path.weights[0] = 1.0
    assert "weights of" in trajectory.certificate.problems[0]
    trajectory._path.weights[0] = 0.0
    trajectory._path.ids[-1] = 0
    assert "not those that were sampled" in trajectory.certificate.problems[0]


def test_weights_of_tokens(tokenizer):
    trajectory = Trajectory(tokenizer, CHATML)
    trajectory.prompt(ASKED)
    ids = ids_of(tokenizer, "It is 42.<|im_end|>")
    mask = [0.0, *[1.0] * (len(ids) - 1)]
    trajectory.reply(ids, weights=mask)
    assert not trajectory.has_log_probabilities
    [path] = trajectory.paths()
    assert path.weights[path.begins[0] :].tolist() == mask
    assert trajectory.certificate.weight == len(ids) - 1
