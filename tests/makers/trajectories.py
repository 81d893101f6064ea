"""Small trajectories whose template drops thoughts of earlier replies, so that later paths rewrite
some of them and repeat others.
"""

from makers.tokenizers import CHAT_CONTROLS, tiny_tokenizer
from penstock.chat import Template, Trajectory

THINKS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Thoughts stay until the next message of a user, as in templates of Qwen."""
LOOKS = "<think>\nI look.\n</think>\n\nlevel Aare<|im_end|>"
SAYS = "It is 42.<|im_end|>"
MORE = "It is 7.<|im_end|>"


def thinking_tokenizer(folder):
    """Its tokenizer, with the markers of thoughts as control tokens."""
    texts = ["What is 6 times 7? It is 42. I look. level Aare"] * 20
    return tiny_tokenizer(folder, texts, 340, [*CHAT_CONTROLS, "<think>", "</think>"])


def say(trajectory, role, content, reply, log=-0.5, **more):
    """One message, and what is sampled after it: the first token is less probable."""
    trajectory.prompt([{"role": role, "content": content}])
    ids = trajectory.tokenizer.encode(reply, allow_control=True).tolist()
    return trajectory.reply(ids, [6 * log] + [log] * (len(ids) - 1), **more)


def thinking_trajectory(tokenizer, *, masked=0, log=-0.5):
    """A question, a call with a thought, its result, an answer; then another question, before which
    the call loses its thought: a second path. Its reply's last `masked` tokens are masked.
    """
    template = Template(source=THINKS, name="thinks")
    trajectory = Trajectory(tokenizer, template, history="template")
    say(trajectory, "user", "What is it?", LOOKS, log)
    say(trajectory, "tool", "42", SAYS, log)
    count = len(tokenizer.encode(MORE, allow_control=True))
    weights = [1.0] * (count - masked) + [0.0] * masked
    say(trajectory, "user", "And 7?", MORE, log, weights=weights)
    return trajectory
