"""Trajectories with images, of small processors."""

from makers.media import picture, processor
from penstock.chat import Template, Trajectory
from penstock.integrations.huggingface.vision_examples import own_tokenizer
from penstock.media.processor import HuggingFaceProcessor

HISTORIES = ("sampled", "template", "tool_cycle")
CONTROLS = ("<|im_start|>", "<|im_end|>", "<image>")
A, B, C, D = (
    picture(84, 112, 1),
    picture(60, 200, 2),
    picture(112, 112, 3),
    picture(84, 112, 4),
)
PARTS = (
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLY = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}


def said(*parts, role="user"):
    """A message of texts and pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": role, "content": content}


CONVERSATION = [
    [said(A, "What is it?")],
    [said("And ", B, "\n\nor ", C)],
    [said("Only text.")],
    [said(D)],
]


def family_of(name):
    """Tokenizer, template and processor of a family."""
    inner = processor(name)
    names = {
        label: str(text)
        for label, text in inner.tokenizer.special_tokens_map.items()
        if isinstance(text, str)
    }
    template = Template(source=inner.chat_template, name=name, variables=names)
    return own_tokenizer(inner.tokenizer), template, HuggingFaceProcessor(inner, name)


def forgetting(source):
    """A template that writes earlier replies in another way."""
    start = "{% for message in messages %}" if "for message in" in source else None
    name = "message" if start else "m"
    loop = start or "{% for m in messages %}"
    return source.replace(
        loop,
        loop
        + "{% if "
        + name
        + ".role == 'assistant' and loop.index0 < messages | length - 2 %}It was said. "
        "{% endif %}",
    )


def play(parts, replies, history="sampled", prompts=CONVERSATION, **more):
    """A trajectory with replies of ordinary tokens, as texts."""
    tokenizer, template, made = parts
    trajectory = Trajectory(tokenizer, template, history=history, processor=made, **more)
    for new, text in zip(prompts, replies, strict=False):
        trajectory.prompt(new)
        ids = tokenizer.encode(text).tolist()
        trajectory.reply(ids, [-0.5] * len(ids), REPLY | {"content": text})
    return trajectory


def places(images):
    """What two lists of images have in common where they are equal."""
    return [(place.begin, place.end, place.layout.slots, one.digest) for one, place in images]
