"""The same records give the same documents wherever they come from: JSON, columnar formats, or
Python.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from makers.datasets import prepare_here
from penstock import open_dataset
from penstock.chat import ChatEncoder, load_template, read_conversation
from penstock.chat.records.layouts import read_record
from penstock.chat.records.nulls import without_added_nulls
from penstock.core.columnar import OwnNulls, as_plain
from penstock.core.errors import RecordError
from penstock.data.sources import Fields, open_records, open_sources
from penstock.data.sources.arrow_values import decoded_rows

datasets = pytest.importorskip("datasets")

# Columnar formats have one order of names for all objects, so the template sorts them.
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for t in tools %}{{ t | tojson(sort_keys=true) }}{{ '\n' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif -%}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content %}{{ m.content }}{% endif -%}
{%- for c in m.tool_calls or [] %}{{ '<call>{"name": "' + c.function.name + '", "arguments": ' }}
{%- set a = c.function.arguments %}{{ a if a is string else a | tojson(sort_keys=true) -}}
{{ '}</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""  # noqa: E501
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(["Oslo", "", "null", "3", "a\nb", "Zürich"]),
    "integer": st.integers(-5, 5),
    "number": st.sampled_from([0.5, -1.25, 3.0]),
    "boolean": st.booleans(),
}
NAMES = ["city", "zone", "unit", "n", "deep", "items"]


@st.composite
def schemas(draw, depth=2):
    """A JSON schema of an object; some of its properties are required."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    properties: dict[str, Any] = {}
    for name in names:
        # Arrow makes one type of whole numbers and others, so a name has one of the two.
        scalars = [
            kind
            for kind in SCALARS
            if kind != ("integer" if name in ("city", "zone", "unit") else "number")
        ]
        kind = draw(st.sampled_from(["object", "array", *scalars] if depth else scalars))
        if kind == "object":
            properties[name] = draw(schemas(depth=depth - 1))
        elif kind == "array":
            properties[name] = {"type": "array", "items": {"type": draw(st.sampled_from(scalars))}}
        else:
            properties[name] = {"type": kind}
            if kind == "string" and draw(st.booleans()):
                properties[name]["enum"] = ["Oslo", "Rome"]
        if draw(st.booleans()):
            properties[name]["description"] = "what it is"
    required = [name for name in names if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        **({"required": required} if required else {}),
    }


@st.composite
def arguments_of(draw, schema):
    """Arguments that a schema allows, without some of those that it does not require."""
    found = {}
    for name, own in schema["properties"].items():
        if name not in schema.get("required", []) and draw(st.booleans()):
            continue
        if own["type"] == "object":
            found[name] = draw(arguments_of(own))
        elif own["type"] == "array":
            found[name] = draw(st.lists(SCALARS[own["items"]["type"]], max_size=2))
        else:
            found[name] = draw(SCALARS[own["type"]])
    return found


@st.composite
def record_lists(draw):
    """Records with tools of several schemas, and calls of them."""
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": "d", "parameters": draw(schemas())},
        }
        for name in draw(
            st.lists(st.sampled_from(["weather", "time", "rank"]), min_size=1, unique=True)
        )
    ]
    if draw(st.booleans()):
        del tools[0]["function"]["description"]
    return [draw(records(tools)) for _ in range(draw(st.integers(1, 3)))]


@st.composite
def records(draw, tools):
    """One of these records; it has a call of each of its tools."""
    own = draw(
        st.lists(
            st.sampled_from(tools), unique_by=lambda tool: tool["function"]["name"], min_size=1
        )
    )
    calls = [
        {
            "id": f"call{place}",
            "type": "function",
            "function": {
                "name": tool["function"]["name"],
                "arguments": draw(arguments_of(tool["function"]["parameters"])),
            },
        }
        for place, tool in enumerate(own)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": calls},
    ]
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    return {"messages": [*messages, {"role": "assistant", "content": "done"}], "tools": own}


def is_arrow(records: list[dict[str, Any]]) -> bool:
    """Whether Arrow can hold the records without its type of JSON and without loss; it makes 0.0 of
    false, and of 0.
    """
    try:
        rows = pa.Table.from_pylist(records).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return False
    return json.dumps(bare(rows), sort_keys=True) == json.dumps(records, sort_keys=True)


def bare(value: Any) -> Any:
    """A value without any null."""
    if isinstance(value, dict):
        return {key: bare(item) for key, item in value.items() if item is not None}
    return [bare(item) for item in value] if isinstance(value, list) else value


def holds_empty(kind: pa.DataType) -> bool:
    """Whether a type has a struct without fields, which Parquet cannot hold."""
    if pa.types.is_struct(kind) and not kind.num_fields:
        return True
    return any(holds_empty(kind.field(place).type) for place in range(kind.num_fields))


def places(records: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Each way to hand records over."""
    ways: dict[str, Any] = {"python": records}
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    ways["jsonl"] = str(folder / "a.jsonl")
    if is_arrow(records):
        table = pa.Table.from_pylist(records)
        ways |= {"table": table, "rows": table.to_pylist()}
        if not any(holds_empty(kind) for kind in table.schema.types):
            pq.write_table(table, folder / "a.parquet")
            ways["parquet"] = str(folder / "a.parquet")
    try:
        made = datasets.Dataset.from_list(records, on_mixed_types="use_json")
    except (pa.ArrowException, TypeError):
        return ways
    made.save_to_disk(str(folder / "saved"))
    return ways | {
        "dataset": made,
        "dataset rows": list(made),
        "streaming": made.to_iterable_dataset(),
        "saved": str(folder / "saved"),
    }


def objects(source: Any) -> list[dict[str, Any]]:
    fields = Fields(whole=True)
    parts = (
        open_sources(source, fields=fields)
        if isinstance(source, str)
        else open_records(source, fields=fields)
    )
    blocks = [block for part in parts for block in part.objects()]
    assert not any(block.rejects for block in blocks)
    return [record for block in blocks for record in block.objects]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, chat_tokenizer):
    path = tmp_path_factory.mktemp("template") / "calls.jinja"
    path.write_text(TEMPLATE)
    return ChatEncoder(chat_tokenizer, load_template(path, tokenizer=chat_tokenizer))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(records=record_lists())
def test_the_same_records_give_the_same_documents(encoder, tmp_path_factory, records):
    datasets.disable_progress_bars()
    texts = {}
    for way, source in places(records, tmp_path_factory.mktemp("records")).items():
        texts[way] = [encoder.encode(read_record(one))[0].text for one in objects(source)]
        if way.endswith("rows"):
            assert [encoder.encode(read_conversation(one))[0].text for one in source] == texts[
                way
            ], way
    assert all(found == texts["jsonl"] for found in texts.values()), texts


def calling(arguments: Any, name: str = "weather", call: str = "c1") -> dict[str, Any]:
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": list(required),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": schema},
    }


def asking(*calls: dict[str, Any], tools: Any = None) -> dict[str, Any]:
    results = [{"role": "tool", "content": "rain"} for _ in calls]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": list(calls)},
    ]
    record: dict[str, Any] = {
        "messages": [*messages, *results, {"role": "assistant", "content": "done"}]
    }
    return record if tools is None else {**record, "tools": tools}


def arguments(record: dict[str, Any]) -> list[Any]:
    calls = [call for message in record["messages"] for call in message.get("tool_calls") or ()]
    return [call["function"]["arguments"] for call in calls]


TEXT, MAYBE = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.fixture
def two_calls():
    return asking(calling({"city": "Oslo"}), calling({"zone": "CET"}, "time", "c2"))


def test_nulls_of_structs_are_removed_and_counted(two_calls, tmp_path, chat_tokenizer):
    pq.write_table(pa.Table.from_pylist([two_calls] * 3), tmp_path / "n.parquet")
    template = tmp_path / "calls.jinja"
    template.write_text(TEMPLATE)
    report = prepare_here(
        tmp_path / "n.parquet", chat_tokenizer, tmp_path / "out", template=str(template)
    )
    place = "messages[].tool_calls[].function.arguments"
    assert report.chats["nulls"] == {place: 6}
    assert f"nulls of the columnar format, removed: {place} 6" in str(report)
    plain = prepare_here(
        [two_calls] * 3, chat_tokenizer, tmp_path / "plain", template=str(template)
    )
    assert plain.chats["nulls"] == {}
    assert [list(one.tokens) for one in open_dataset(report.output)] == [
        list(one.tokens) for one in open_dataset(plain.output)
    ]


def test_nulls_of_json_lines_stay(tmp_path):
    record = asking(
        calling({"city": None}), tools=[tool("weather", city={**MAYBE, "default": None}, n=TEXT)]
    )
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    assert objects(str(tmp_path / "a.jsonl")) == [record]
    assert objects([record]) == [record]


@pytest.mark.parametrize("way", ["parquet", "table", "rows"])
def test_a_schema_settles_what_nobody_can_see(way, tmp_path):
    tools = [
        tool("weather", ("city", "unit"), city=TEXT, unit={**MAYBE}),
        tool("time", zone={**MAYBE, "default": None}, at={**TEXT, "default": "now"}),
    ]
    record = asking(
        calling({"city": "Oslo", "unit": None}), calling({"zone": "CET"}, "time", "c2"), tools=tools
    )
    table = pa.Table.from_pylist([record, record])
    pq.write_table(table, tmp_path / "a.parquet")
    source = {"parquet": str(tmp_path / "a.parquet"), "table": table, "rows": table.to_pylist()}[
        way
    ]
    for found in objects(source):
        assert arguments(found) == [{"city": "Oslo", "unit": None}, {"zone": "CET"}]
        zone = found["tools"][1]["function"]["parameters"]["properties"]["zone"]
        assert zone["default"] is None
        assert list(found["tools"][0]["function"]["parameters"]["properties"]) == ["city", "unit"]


def test_nulls_of_other_objects_are_removed_too(tmp_path):
    kinds: list[dict[str, Any]] = [
        {"type": "json", "json": {"name": "a", "strict": True}}, {"type": "text", "text": {"n": 1}},
    ]  # fmt: skip
    records = [{**asking(), "chat_template_kwargs": {"format": one}} for one in kinds]
    assert [
        one["chat_template_kwargs"]["format"] for one in objects(pa.Table.from_pylist(records))
    ] == kinds


@pytest.mark.parametrize("deep", [False, True])
def test_columns_of_json_are_decoded(deep, tmp_path):
    said = "Line\nbreak" if deep else "Hi"
    asked = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
    ]
    records: list[dict[str, Any]] = [
        {"messages": [one, {"role": "assistant", "content": answer}]}
        for one, answer in zip(asked, (said, "c"), strict=True)
    ]
    if deep:  # then each message is JSON as a whole
        records[0]["messages"][1]["tool_calls"] = [calling({"x": 1, "no": None})]
        records[1]["messages"][1]["tool_calls"] = [calling({"x": "1"})]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    datasets.disable_progress_bars()
    made = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "a.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    for source in (str(tmp_path / "a.parquet"), str(tmp_path / "saved"), made, list(made)):
        assert objects(source) == records


def test_texts_in_columns_of_json_are_decoded(tmp_path, chat_tokenizer):
    texts = ["one", "two\nlines", 3, None]
    column = pa.ExtensionArray.from_storage(
        pa.json_(), pa.array([json.dumps(text) for text in texts])
    )
    inner = pa.ExtensionArray.from_storage(
        pa.json_(), pa.array([json.dumps({"body": text}) for text in texts])
    )
    pq.write_table(pa.table({"text": column, "page": inner}), tmp_path / "a.parquet")
    for name in ("text", "page.body"):
        [part] = open_sources(str(tmp_path / "a.parquet"), fields=Fields(text=name))
        [block] = part.blocks()
        assert block.texts.to_pylist() == texts[:2]
        assert [(one.line, one.reason.partition(";")[0]) for one in block.rejects] == [
            (2, f"field {name!r} holds a number"), (3, f"field {name!r} is null"),
        ]  # fmt: skip


def test_json_that_is_none_is_a_reject(tmp_path):
    storage = pa.array(['{"role": "user", "content": "q"}', '{"role": '])
    column = pa.ExtensionArray.from_storage(pa.json_(), storage)
    pq.write_table(pa.table({"message": column}), tmp_path / "a.parquet")
    [part] = open_sources(str(tmp_path / "a.parquet"), fields=Fields(whole=True))
    [block] = part.objects()
    assert [len(block), block.rejects[0].line] == [1, 1]
    assert "column of JSON that cannot be decoded" in block.rejects[0].reason


def nested_types(depth=3):
    leaves = st.sampled_from([pa.int64(), pa.string(), pa.json_(), pa.bool_()])
    if not depth:
        return leaves
    inner = nested_types(depth - 1)
    return st.one_of(
        leaves,
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: pa.struct([(f"f{n}", k) for n, k in enumerate(kinds)])
        ),
    )


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Pairs of a value as Arrow takes it, and as it should be read."""
    if isinstance(kind, pa.JsonType):
        made = st.sampled_from([1, "a", None, {"b": None}, [{"c": [None, {"d": None}]}], {"e": {}}])
        return made.map(lambda value: (json.dumps(value), value)) | st.just((None, None))
    if pa.types.is_struct(kind):
        each = st.tuples(*(values_of(field.type) for field in kind))
        names = [field.name for field in kind]
        found = each.map(
            lambda pairs: tuple(
                dict(zip(names, one, strict=True)) for one in zip(*pairs, strict=True)
            )
        )
    elif pa.types.is_map(kind):
        each = st.dictionaries(st.sampled_from("xyz"), values_of(kind.item_type), max_size=2)
        found = each.map(
            lambda d: ([(k, v[0]) for k, v in d.items()], {k: v[1] for k, v in d.items()})
        )
    elif pa.types.is_nested(kind):
        size = (
            {"min_size": 2, "max_size": 2} if pa.types.is_fixed_size_list(kind) else {"max_size": 3}
        )
        found = st.lists(values_of(kind.value_type), **size).map(
            lambda pairs: ([a for a, _ in pairs], [b for _, b in pairs])
        )
    else:
        leaves = {
            pa.int64(): st.integers(0, 9),
            pa.string(): st.sampled_from(["", "s"]),
            pa.bool_(): st.booleans(),
        }
        found = leaves[kind].map(lambda value: (value, value))
    return found | st.just((None, None))


def stored(kind: pa.DataType, name: str = "item") -> pa.Field:
    """A field of the type with texts in place of JSON and a mark, as files hold it."""
    if isinstance(kind, pa.JsonType):
        marks = {"ARROW:extension:name": "arrow.json", "ARROW:extension:metadata": ""}
        return pa.field(name, pa.string(), metadata=marks)
    if pa.types.is_struct(kind):
        kind = pa.struct([stored(field.type, field.name) for field in kind])
    elif pa.types.is_map(kind):
        kind = pa.map_(kind.key_type, stored(kind.item_type, "value"))
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(stored(kind.value_type), kind.list_size)
    elif pa.types.is_large_list(kind):
        kind = pa.large_list(stored(kind.value_type))
    elif pa.types.is_list(kind):
        kind = pa.list_(stored(kind.value_type))
    return pa.field(name, kind)


def own_nulls(value: Any) -> Counter[bool]:
    """Objects with nulls, by whether they say that these are their own."""
    found: Counter[bool] = Counter()
    if isinstance(value, dict):
        found[isinstance(value, OwnNulls)] += None in value.values()
    for inner in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        found += own_nulls(inner)
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=nested_types())
def test_any_type_is_read_as_it_was_written(data, kind):
    pairs = data.draw(st.lists(values_of(kind), max_size=5))
    schema = pa.schema([stored(kind, "a")])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(pa.Table.from_pylist([{"a": given} for given, _ in pairs], schema))
    first = data.draw(st.integers(0, len(pairs)))
    table = pa.ipc.open_stream(sink.getvalue()).read_all().slice(first)
    assert table.schema.field("a").type == kind
    rows = list(decoded_rows(table))
    assert rows == [({"a": right}, None) for _, right in pairs[first:]]
    if kind == pa.json_():
        assert not own_nulls([row for row, _ in rows])[False] - sum(
            right is None for _, right in pairs[first:]
        )


def test_frames_of_pandas_are_read(two_calls, tmp_path, encoder):
    pandas = pytest.importorskip("pandas")
    pq.write_table(
        pa.Table.from_pylist([two_calls, {**two_calls, "score": 1.5}]), tmp_path / "a.parquet"
    )
    frame = pandas.read_parquet(tmp_path / "a.parquet")
    assert isinstance(frame["messages"][0], np.ndarray)
    right = encoder.encode(read_record(two_calls))[0].text
    for source in (frame, frame.to_dict("records")):
        assert [encoder.encode(read_record(one))[0].text for one in objects(source)] == [
            right,
            right,
        ]
    assert encoder.encode(read_conversation(frame.to_dict("records")[0]))[0].text == right


def test_what_is_no_list_of_records_is_named(two_calls):
    with pytest.raises(RecordError, match="put it into a list"):
        objects(two_calls)
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([two_calls])})
    with pytest.raises(RecordError, match="splits train; give one"):
        objects(splits)


def test_rows_that_were_chosen_keep_their_order(two_calls):
    made = datasets.Dataset.from_list([{**two_calls, "n": n} for n in range(5)])
    assert [one["n"] for one in objects(made.select([3, 1, 4]))] == [3, 1, 4]
    changed = made.with_transform(lambda batch: {**batch, "n": [n + 10 for n in batch["n"]]})
    assert [one["n"] for one in objects(changed)] == [10, 11, 12, 13, 14]


def test_plain_values_are_not_copied():
    value = {"a": [1, {"b": "c"}]}
    assert as_plain(value) is value
    assert as_plain({"a": np.array([1, 2]), "b": np.float32(0.5)}) == {"a": [1, 2], "b": 0.5}
    sound, picture = {"audio": np.zeros(3)}, {"image": np.zeros((2, 2, 3))}
    assert as_plain(sound) is sound
    assert as_plain(picture) is picture
    assert without_added_nulls(value)[0] is value


@pytest.mark.parametrize("nested", [False, True])
def test_messages_as_json_text_are_parsed(nested):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    given = [json.dumps(one) for one in messages] if nested else json.dumps(messages)
    assert read_record({"messages": given}) == read_record({"messages": messages})
    with pytest.raises(RecordError, match=r"JSON.*list.*messages.*JSON"):
        read_record({"messages": '[{"role": "user"'})
