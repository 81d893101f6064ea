"""Keywords of `prepare`: typed as the settings classes are, and refused with the one that was
meant.
"""

import inspect
import json
from typing import Any, get_type_hints

import pytest

import penstock as ps
from makers.datasets import prepare_here
from penstock import ChatOptions, prepare
from penstock.core.errors import ConfigError
from penstock.data.prepare import ChatSettings, PrepareSettings
from penstock.data.prepare.chat_settings import GROUPS, OF_TEMPLATE
from penstock.data.prepare.options import FIELD_OPTIONS, PARAMETERS, PrepareOptions, merge_options
from penstock.data.sources import Fields


def given(settings: type) -> dict[str, Any]:
    """Field → type, of the fields that can be given; for a tuple of texts a list does, too."""
    hints = get_type_hints(settings)
    wider = {tuple[str, ...]: list[str] | tuple[str, ...]}
    return {
        name: wider.get(hints[name], hints[name])
        for name, field in settings.__dataclass_fields__.items()
        if field.init
    }


def test_keywords_are_the_fields_of_the_settings_classes():
    chats = {name: kind for name, kind in given(ChatSettings).items() if name in OF_TEMPLATE}
    for group in GROUPS.values():
        chats |= given(group)
    assert get_type_hints(ChatOptions) == chats
    options = get_type_hints(PrepareOptions)
    assert options.pop("chat") == ChatOptions | ChatSettings | None
    fields = {name: given(Fields)[field] for name, field in FIELD_OPTIONS.items()}
    settings = {name: kind for name, kind in given(PrepareSettings).items() if name != "chat"}
    # `template` is a parameter of its own; `fields` of chats has the name of another setting, and
    # is a mapping.
    settings["fields"] |= chats["fields"]
    flat = {name: kind for name, kind in chats.items() if name not in ("template", "fields")}
    assert options == {**flat, **settings, **fields}
    in_signature = [
        name for name in inspect.signature(prepare).parameters if name not in ("source", "options")
    ]
    assert [*PARAMETERS] == in_signature


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mask_histroy": True},
            "'mask_histroy' is not an option of prepare; did you mean 'mask_history'",
        ),
        ({"proceses": 2}, "'proceses' is not an option of prepare; did you mean 'processes'"),
        (
            {"chat": {"mask_histroy": True}},
            "'mask_histroy' is not a setting of chats; did you mean 'mask_history'",
        ),
        (
            {"chat": True},
            r"chat must be penstock\.ChatOptions\(…\), such as mask_history=True, got True",
        ),
        ({"mask_history": True}, "mask_history is for chats: give a template"),
        ({"chat": {}, "text_field": "body"}, "text_field, weights_field and columns are for texts"),
    ],
)
def test_keywords_that_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        merge_options(None, options)


def test_chat_options_are_the_flat_keywords_together():
    together = merge_options(
        None, {"chat": ps.ChatOptions(mask_history=True, roles_to_train=("tool",), template="t")}
    )
    flat = merge_options(None, {"mask_history": True, "roles_to_train": ("tool",), "template": "t"})
    assert together == flat
    assert together.chat.mask_settings.mask_history
    over = merge_options(together, {"mask_history": False})
    assert (over.chat.mask_settings.mask_history, over.chat.template) == (False, "t")
    assert merge_options(
        None, {"chat": ps.ChatOptions(fields={"prompt": "q"})}
    ).chat.layout.fields == {"prompt": "q"}
    assert merge_options(None, {"chat": {}}).chat == ChatSettings()
    assert merge_options(None, {}).chat is None


def test_prepare_takes_chat_options(tmp_path):
    tokenizer = ps.train_tokenizer(
        ["Gate 1 is open."] * 9,
        vocab_size=300,
        output=tmp_path / "tokenizer",
        special_tokens=["<|im_end|>"],
        progress=False,
    )
    messages = [
        {"role": role, "content": f"Gate {n}"} for n in range(2) for role in ("user", "assistant")
    ]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    trained = []
    for chat in (
        ps.ChatOptions(template=template),
        ps.ChatOptions(template=template, mask_history=True),
    ):
        output = tmp_path / f"out-{len(trained)}"
        prepare(
            iter([{"messages": messages}]),
            tokenizer=tokenizer,
            output=output,
            chat=chat,
            processes=1,
            progress=False,
        )
        trained.append(ps.open_dataset(output).manifest.trained_tokens)
    assert 0 < trained[1] < trained[0]


@pytest.mark.parametrize("validation", [0.0, 0.5])
def test_documents_that_train_nothing_are_counted(tmp_path, tokenizer, capsys, validation):
    """With a field of loss weights, and only there; duplicates that were dropped do not count."""
    ranges = [[], [{"begin": 0, "end": 3}], None, [{"begin": 0, "end": 3, "weight": 0}], []]
    records = [
        {"text": f"the water {number} never stops", "w": one} for number, one in enumerate(ranges)
    ]
    options = {"weights_field": "w", "validation": validation, "progress": True}
    report = prepare_here(iter(records), tokenizer, tmp_path / "out", **options)
    due = "3 documents of 5 train nothing: no token after the first has a loss weight"
    assert (report.untrained_documents, due in str(report), due in capsys.readouterr().err) == (
        3,
        True,
        True,
    )
    assert (
        prepare_here(iter(records), tokenizer, tmp_path / "out", **options).untrained_documents == 3
    )
    assert json.loads((tmp_path / "out/report.json").read_text())["untrained_documents"] == 3
    twice = prepare_here(
        iter(records * 2), tokenizer, tmp_path / "two", weights_field="w", drop_duplicates=True
    )
    assert (twice.documents, twice.untrained_documents) == (5, 3)
    plain = prepare_here(iter(records), tokenizer, tmp_path / "plain")
    assert (plain.untrained_documents, "train nothing" in str(plain)) == (None, False)
    assert "untrained_documents" not in (tmp_path / "plain/report.json").read_text()
    good = prepare_here(iter(records[1:3]), tokenizer, tmp_path / "good", weights_field="w")
    assert (good.untrained_documents, "train nothing" in str(good)) == (0, False)
