"""What is refused before the first document, and where ids come from."""

from dataclasses import dataclass, field

import pytest

from makers.tokenizers import tiny_tokenizer
from penstock import Denoise
from penstock.core.errors import ConfigError
from penstock.plan.objectives import CausalLM, Facts, PrefixLM, SpanCorruption
from penstock.tokenizers import add_tokens


@dataclass
class FakeTokenizer:
    special_tokens: dict[str, int]
    name: str = "fake"
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None


@dataclass
class Loads:
    tokenizer: FakeTokenizer
    times: list[int] = field(default_factory=list)

    def __call__(self):
        self.times.append(1)
        return self.tokenizer


def facts(controls=(), *, longest=600, sequence_length=4096):
    given = controls if callable(controls) else Loads(FakeTokenizer(dict(controls)))
    return Facts(
        where="source 'web'", tokenizer=given, sequence_length=sequence_length, longest=longest
    )


def family(form, ids):
    return {form.format(number): token_id for number, token_id in enumerate(ids)}


def test_names_are_looked_up():
    modes = {"[NLU]": 3, "[NLG]": 4, "[S2S]": 5}
    found = Denoise.ul2(input_end="[END]").resolve(
        facts(modes | {"[END]": 6} | family("<extra_id_{}>", range(299, 99, -1)))
    )
    assert [task.mode for task in found.tasks] == [3, 3, 4, 4, 4, 4, 5]
    assert found.input_end == 6
    assert found.sentinels == tuple(range(299, 99, -1))
    assert found.program()[0] == 1


@pytest.mark.parametrize(
    ("form", "first"),
    [
        ("<extra_id_{}>", 500),
        ("<|reserved_special_token_{}|>", 500),
        ("<unused{}>", 500),
        ("<SPECIAL_{}>", 500),
        ("[control_{}]", 500),
    ],
)
def test_spare_tokens_serve_as_sentinels_in_the_order_of_their_numbers(form, first):
    controls = family(form, range(first, first + 200))
    shuffled = dict(sorted(controls.items()))
    assert Denoise.t5().resolve(facts(shuffled)).sentinels == tuple(range(first, first + 200))


def test_sentinels_by_name_come_before_reserved_tokens_and_taken_ones_are_left_out():
    controls = family("<|reserved_{}|>", range(10, 400)) | family(
        "[[sentinel_{}]]", range(500, 600)
    )
    assert Denoise.t5().resolve(facts(controls)).sentinels == tuple(range(500, 600))
    tasks = [SpanCorruption(0.15, 3, mode="[[sentinel_0]]")]
    assert Denoise(tasks).resolve(facts(controls)).sentinels == tuple(range(501, 600))
    framed = FakeTokenizer(controls, eos_id=502)
    assert 502 not in Denoise.t5().resolve(facts(Loads(framed))).sentinels


def test_no_tokenizer_is_opened_where_all_are_ids():
    loads = Loads(FakeTokenizer({}))
    Denoise.ul2r(modes={"R": 1, "X": 2, "S": 3}, sentinels=range(100, 300)).resolve(facts(loads))
    Denoise([CausalLM(), PrefixLM(sentinel=False)]).resolve(facts(loads))
    assert not loads.times


def test_a_missing_mode_token_names_what_there_is_and_the_cures():
    cures = r"modes=.*None.*penstock tokenizer add fake --token NAME"
    have = r"it has \[A\] <extra_id_0> … <extra_id_99> \(100\)"
    with pytest.raises(ConfigError, match=rf"'R' is '\[NLU\]'.*{have}.*{cures}"):
        Denoise.ul2().resolve(facts({"[A]": 1} | family("<extra_id_{}>", range(100, 200))))
    with pytest.raises(ConfigError, match=r"input_end.*'\[END\]'.*none"):
        Denoise.t5(input_end="[END]").resolve(facts())


def test_too_few_sentinels_name_length_and_task_and_what_would_fit():
    few = family("<extra_id_{}>", range(100, 200))
    message = (
        r"source 'web': denoise: a document of 2,400 tokens needs up to 401 sentinels in task 'X', "
        r"and there are 100"
    )
    with pytest.raises(ConfigError, match=message + r"; split documents at max_length=597, or"):
        Denoise.ul2(modes=None).resolve(facts(few, longest=2400))
    assert Denoise.ul2(modes=None).resolve(facts(few, longest=597)).sentinels == tuple(
        range(100, 200)
    )
    assert (
        Denoise.ul2(modes=None, max_length=597)
        .resolve(facts(few, longest=9999))
        .document_limit(4096)
        == 597
    )
    with pytest.raises(ConfigError, match=r"600.*tokens.*needs.*31.*0.*more"):
        Denoise.t5(roll=True).resolve(facts())


def test_the_row_bounds_the_longest_document():
    few = family("<extra_id_{}>", range(100, 200))
    assert Denoise.t5().resolve(facts(few, longest=10**9, sequence_length=2000))


def test_names_must_be_looked_up_before_writing():
    with pytest.raises(ConfigError, match=r"'\[NLU\]'.*looked.*tokenizer"):
        Denoise.ul2(sentinels=range(9)).program()
    with pytest.raises(ConfigError, match="the sentinels must be looked up"):
        Denoise.t5().program()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Denoise([]), "tasks is empty"),
        (lambda: Denoise(["R"]), "a task is 'R'; expected SpanCorruption, PrefixLM or CausalLM"),
        (lambda: SpanCorruption(0, 3), "rate is 0; expected a share above 0 and below 1"),
        (lambda: SpanCorruption(1.5, 3), "rate is 1.5; expected a share"),
        (lambda: SpanCorruption("a", 3), "rate is 'a'; expected a number"),
        (
            lambda: SpanCorruption(0.12345, 3),
            "rate is 0.12345, that is 2469/20000; .* the nearest is",
        ),
        (lambda: SpanCorruption(0.15, 0.5), "mean is 0.5; expected 1 token or more"),
        (
            lambda: SpanCorruption(0.15, 2000),
            "mean is 2000, that is 2000; expected a fraction with numbers up to",
        ),
        (lambda: PrefixLM(rate=1), "rate is 1; expected"),
        (
            lambda: Denoise([CausalLM(weight=0)]),
            "task 'causal': weight is 0; expected a number above 0",
        ),
        (
            lambda: Denoise([CausalLM(weight="x")]),
            "task 'causal': weight is 'x'; expected a number",
        ),
        (
            lambda: Denoise([CausalLM(), PrefixLM(weight=1e-12)]),
            "task 'S': weight 1e-12 is below 2",
        ),
        (
            lambda: Denoise.t5(train_on_inputs=True),
            "train_on_inputs=True needs bidirectional=False",
        ),
        (lambda: Denoise.t5(max_length=0), "max_length is 0; expected a whole number of 1 or more"),
        (lambda: Denoise.t5(max_length=5.5), "max_length is 5.5; expected a whole number"),
        (lambda: Denoise.t5(max_length="5"), "max_length is '5'; expected a whole number"),
        (lambda: Denoise.t5(final_sentinel=2), "final_sentinel is 2; expected True or False"),
        (lambda: Denoise.t5(roll="no"), "roll is 'no'; expected True or False"),
        (lambda: Denoise(CausalLM()), r"tasks is CausalLM\(.*; expected a list"),
        (lambda: Denoise.t5(sentinels=100), "sentinels is 100; expected a list"),
        (
            lambda: Denoise.t5(sentinels="<extra_id_0>"),
            "sentinels is '<extra_id_0>'; expected a list",
        ),
        (
            lambda: Denoise.t5(sentinels=[1, 2.5]),
            "sentinel 1 is 2.5; expected a token's id or name",
        ),
        (lambda: Denoise.t5(input_end=2.5), "input_end is 2.5; expected a token's id or name"),
        (
            lambda: Denoise([CausalLM(mode=True)]),
            "mode token of task 'causal' is True; expected a token's id or name",
        ),
        (lambda: Denoise.ul2r(modes={"r": 5}), "modes names 'r'; expected denoisers among R, X, S"),
        (
            lambda: Denoise.t5(sentinels=[5, 6, 5]),
            "sentinel 2 and Denoise: sentinel 0 are both id 5",
        ),
        (
            lambda: Denoise.t5(sentinels=[5], input_end=5),
            "sentinel 0 and Denoise: input_end are both id 5",
        ),
        (
            lambda: Denoise([PrefixLM(mode=5)], sentinels=[5]),
            "sentinel 0 and .* mode token of task 'S' are both id 5",
        ),
        (lambda: Denoise.t5(sentinels=[-1]), "sentinel 0 is -1; expected a token id"),
    ],
)
def test_settings_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_settings_are_values():
    assert Denoise.ul2() == Denoise.ul2()
    assert hash(Denoise.ul2()) == hash(Denoise.ul2())
    assert Denoise.t5(sentinels=[1, 2]) == Denoise.t5(sentinels=range(1, 3))
    assert repr(Denoise.t5(roll=True)) != repr(Denoise.t5())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["the cat sat on the mat", "a dog ran in the park"] * 20
    tiny_tokenizer(folder / "base", texts, 300)
    tiny_tokenizer(folder / "other", texts[:1] * 9, 290)
    return folder


def test_names_from_an_extension_of_the_datasets_tokenizer(trained):
    from penstock import load_tokenizer

    base = load_tokenizer(trained / "base")
    first = base.vocab_size
    more = trained / "more"
    add_tokens(base, ["[NLU]", "[NLG]", "[S2S]"], sentinels=101, output=more)
    found = Denoise.ul2(tokenizer=str(more)).resolve(facts(lambda: base))
    assert [task.mode for task in found.tasks][::3] == [first, first + 1, first + 2]
    assert found.sentinels == tuple(range(first + 3, first + 104))
    other = load_tokenizer(trained / "other")
    with pytest.raises(
        ConfigError,
        match=r"more is no.*id \d+ is .*tokenizer add",
    ):
        Denoise.ul2(tokenizer=str(more)).resolve(facts(lambda: other))
