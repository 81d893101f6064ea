"""The chat page in a headless Chromium, against a server."""

import time
from dataclasses import replace

import pytest
from serving_makers import HTML, make_model, running

from makers.browser import Browser
from patience import PATIENCE_SECONDS, wait_for

SAYS = f"One <b>two</b> {HTML} & \u202e🙂\nthree"


def visit(browser: Browser, url: str, **look) -> Browser:
    browser.events.clear()
    browser.look(**look)
    browser.call("Page.navigate", url=url)
    until(browser, "document.documentElement?.dataset.ready")
    return browser


def until(browser: Browser, code: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not browser.run(code):
        assert time.monotonic() < end, (
            f"{code}: {browser.complaints()} {browser.run('document.body.innerText')}"
        )
        time.sleep(0.02)


def say(browser: Browser, text: str) -> None:
    browser.point("#input", click=True)
    browser.call("Input.insertText", text=text)
    browser.key("Enter")


def answered(browser: Browser, turns: int) -> None:
    until(
        browser,
        f"document.querySelectorAll('.message').length === {2 * turns} && "
        "document.querySelector('#stop').hidden",
    )


def words(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.words')].map(words => words.textContent)")


def set_value(browser: Browser, name: str, value: object) -> None:
    browser.run(
        f"(field => {{ field.value = '{value}'; field.dispatchEvent(new Event('change')); "
        f"}})({name})"
    )


@pytest.mark.parametrize("at_once", [False, True])
def test_a_conversation(browser, tokenizer, at_once):
    with running(make_model(tokenizer, text=SAYS, context_length=900, at_once=at_once)) as server:
        page = visit(browser, server.url)
        assert page.text("#model") == "tiny · context of 900 tokens"
        say(page, HTML)
        answered(page, 1)
        # Words are words: no element comes of them.
        assert words(page) == [HTML, SAYS]
        assert page.run("document.querySelectorAll('#messages img, #messages b').length") == 0
        page.point("#open-settings", click=True)
        set_value(page, "system", "Be <i>brief</i>.")
        for name, value in {"temperature": 0.3, "top_k": 4, "seed": 11, "max_tokens": 150}.items():
            set_value(page, name, value)
        say(page, "more")
        answered(page, 2)
        ids, sampling, _ = server.engine.asked[-1]
        text = server.model.tokenizer.decode(ids)
        assert "Be <i>brief</i>." in text
        assert text.count(SAYS) == 1
        assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (
            0.3,
            4,
            11,
            150,
        )
        assert "tokens" in page.text(".message:last-child .note")
        page.point("#new", click=True)
        assert words(page) == []
        assert {url.rsplit("/v1/", 1)[0] for url in page.requests()} <= {
            server.url,
            f"{server.url}/",
            "data:,",
        }
        assert page.complaints() == []


def test_stop_keeps_what_there_is(browser, tokenizer):
    with running(make_model(tokenizer, seconds=0.03)) as server:
        page = visit(browser, server.url)
        say(page, "forever")
        until(page, "document.querySelectorAll('.words')[1]?.textContent.length > 5")
        assert page.run("document.querySelector('#send').hidden")
        page.point("#stop", click=True)
        answered(page, 1)
        wait_for(lambda: server.engine.cancelled == [0], seconds=2)
        assert page.text(".message:last-child .note") == "stopped"
        assert page.run("messages.length") == 2


def test_enter_during_a_reply_keeps_the_words_and_says_when_they_go(browser, tokenizer):
    with running(make_model(tokenizer, seconds=0.03)) as server:
        page = visit(browser, server.url)
        say(page, "forever")
        until(page, "document.querySelectorAll('.words')[1]?.textContent.length > 5")
        say(page, "and then?")
        assert page.run("input.value") == "and then?"
        assert page.text("#status").startswith(
            "The reply is still being generated. Enter sends this when it is done"
        )
        assert page.run("document.querySelectorAll('.message').length") == 2
        assert page.run("document.querySelector('#status').className") == "quiet"
        page.key("Escape")
        answered(page, 1)
        assert page.text("#status") == ""
        assert page.run("input.value") == "and then?"
        page.key("Enter")
        answered(page, 2)
        assert words(page)[2] == "and then?"
        assert page.complaints() == []


def test_slow_models_do_not_stand_still(browser, tokenizer):
    with running(make_model(tokenizer)) as server:
        page = visit(browser, server.url)
        reported = {
            (1, 4): "0.25",
            (1, 30): "0.033",
            (3, 2): "1.5",
            (8, 2): "4",
            (99, 10): "9.9",
            (1234, 10): "123",
        }
        assert {pair: page.run(f"rate({pair[0]}, {pair[1]})") for pair in reported} == reported


def test_faults_are_told_and_the_question_stays(browser, tokenizer):
    with running(make_model(tokenizer)) as server:
        page = visit(browser, server.url)
        say(page, "fail")
        answered(page, 1)
        assert "the server failed at this request" in page.text(".message:last-child .note")
        assert page.run("[messages.length, input.value]") == [0, "fail"]


def test_a_key_is_asked_for(browser, tokenizer):
    with running(make_model(tokenizer), api_keys=("secret",)) as server:
        page = visit(browser, server.url)
        assert "no valid API key" in page.text("#status")
        assert page.run("document.querySelector('#settings').hidden") is False
        assert focused(page) == "key"
        set_value(page, "key", "secret")
        until(page, "document.querySelector('#status').textContent === ''")
        say(page, "Hi")
        answered(page, 1)
        assert words(page)[1].startswith("Hello")


def test_dropped_turns_are_told_on_a_narrow_screen(browser, tokenizer):
    with running(make_model(tokenizer, context_length=120)) as server:
        page = visit(browser, server.url, width=390, height=700, scheme="dark")
        for turn in (1, 2):
            say(page, "x" * 50)
            answered(page, turn)
        assert "tokens of earlier turns did not fit" in page.text(".message:last-child .note")
        assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_model_without_chats_writes_on(browser, tokenizer):
    with running(make_model(tokenizer, chat=False)) as server:
        page = visit(browser, server.url)
        assert "no chat template" in page.text("#model")
        say(page, "Once")
        answered(page, 1)
        assert words(page) == ["Once", "Hello wörld 🙂!"]


def test_the_name_and_size_of_the_model_are_shown(browser, tokenizer):
    with running(make_model(tokenizer, parameters=12_345_678)) as server:
        page = visit(browser, server.url)
        assert page.text("#model") == "tiny · 12.3 M parameters · context of 256 tokens"
        assert (page.text("#name"), page.run("document.title")) == ("tiny", "tiny · penstock chat")
        sizes = {
            7: "7",
            1234: "1.23 k",
            999_999: "1000 k",
            7_241_732_096: "7.24 B",
            1_040_000_000_000: "1.04 T",
        }
        assert {count: page.run(f"inShort({count})") for count in sizes} == sizes


@pytest.mark.parametrize("chat", [True, False])
def test_two_messages_to_begin_with(browser, tokenizer, chat):
    with running(make_model(tokenizer, chat=chat)) as server:
        page = visit(browser, server.url)
        offered = page.run(
            "[...document.querySelectorAll('#starters button')].map(button => button.textContent)"
        )
        assert len(set(offered)) == 2
        assert all(offered)
        page.point("#starters button:last-child", click=True)
        answered(page, 1)
        assert words(page) == [offered[1], "Hello wörld 🙂!"]
        assert page.run("empty.hidden")
        page.point("#new", click=True)
        assert page.text("#starters button") == offered[0]
        assert page.complaints() == []


def test_what_happens_before_the_first_word_is_told(browser, tokenizer):
    with running(make_model(tokenizer, seconds=1.6)) as server:
        page = visit(browser, server.url)
        say(page, "Hi")
        until(
            page, "document.querySelectorAll('.note')[1]?.textContent === 'reading the prompt, 1 s'"
        )
        assert (
            page.text("#status") == "A reply is being written: Enter waits for it, Escape stops it."
        )
        until(page, "document.querySelectorAll('.words')[1].textContent.length > 0")
        assert page.run("document.querySelectorAll('.note')[1].textContent") == ""
        page.key("Escape")
        answered(page, 1)
        assert page.text("#status") == ""


def test_a_server_that_loads_its_model_is_waited_for(browser, tokenizer):
    with running(make_model(tokenizer)) as server:
        page = visit(browser, server.url)
        page.run(
            "window.answers = fetch; model = null; fetch = async () => { throw new "
            "TypeError('no answer'); };connecting = connect().finally(() => { connecting = "
            "null; }); 0"
        )
        until(
            page,
            "document.querySelector('#status').textContent.includes('it may still load its model')",
        )
        say(page, "Hi")
        assert page.text("#status") == "The model is not there yet. Enter sends this when it is."
        assert page.run("input.value") == "Hi"
        page.run("fetch = window.answers; 0")
        until(page, "model !== null && connecting === null")
        assert page.text("#status") == ""
        page.key("Enter")
        answered(page, 1)
        assert words(page)[0] == "Hi"


def focused(browser: Browser) -> str:
    return browser.run("document.activeElement.id")


def tab(browser: Browser, *, back: bool = False) -> str:
    keys = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9, "modifiers": 8 * back}
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, **keys)
    return focused(browser)


def test_the_keyboard_alone_is_enough(browser, tokenizer):
    with running(make_model(tokenizer, text="One. Two?\nThree")) as server:
        page = visit(browser, server.url)
        assert focused(page) == "input"
        assert [tab(page, back=True) for _ in range(6)][-3:] == ["open-settings", "new", "skip"]
        page.key("Enter")  # the link to the message
        until(page, "document.activeElement.id === 'input'")
        page.call("Input.insertText", text="first")
        enter = {"key": "Enter", "windowsVirtualKeyCode": 13, "text": "\r", "modifiers": 8}
        page.call("Input.dispatchKeyEvent", type="keyDown", **enter)
        page.call("Input.insertText", text="second")
        assert page.run("[input.value, messages.length]") == ["first\nsecond", 0]
        assert tab(page) == "send"
        page.key("Enter")
        answered(page, 1)
        assert words(page)[0] == "first\nsecond"
        assert focused(page) == "input"
        # The settings take the focus, and Escape gives it back.
        page.run("document.querySelector('#open-settings').focus()")
        page.key("Enter")
        until(page, "document.activeElement.id === 'system'")
        assert tab(page) == "temperature"
        page.key("Escape")
        assert page.run("document.querySelector('#settings').hidden")
        assert focused(page) == "open-settings"
        unnamed = (
            "[...document.querySelectorAll('button, input, textarea')].filter(each => "
            "!(each.labels?.length || each.ariaLabel || each.textContent.trim() || "
            "each.hidden)).map(each => each.id)"
        )
        assert page.run(unnamed) == []


def test_a_reply_is_read_out_by_sentences(browser, tokenizer):
    spoken = "[...document.querySelectorAll('#spoken > p')].map(line => line.textContent.trim())"
    with running(make_model(tokenizer, text="One. Two?\nThree", seconds=0.02)) as server:
        page = visit(browser, server.url)
        assert page.run("[spoken.ariaLive, document.querySelector('#messages').ariaLive]") == [
            "polite",
            None,
        ]
        say(page, "Hi")
        until(page, f"{spoken}.length === 2")
        page.run("document.querySelector('#conversation').focus()")
        answered(page, 1)
        assert page.run(spoken)[:3] == ["tiny: One.", "Two?", "Three"]
        assert "tokens" in page.run(spoken)[3]
        assert focused(page) == "conversation"  # who reads stays there


def test_sliders_that_nobody_moved_leave_the_models_defaults(browser, tokenizer):
    model = replace(make_model(tokenizer), sampling={"temperature": 0.33, "top_k": 7})
    with running(model) as server:
        page = visit(browser, server.url)
        say(page, "Hi")
        answered(page, 1)
        sampling = server.engine.asked[-1][1]
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.33, 1, 7)
        moved = "field.value = '1.5'; field.dispatchEvent(new Event('input'))"
        page.run(f"(field => {{ {moved} }})(temperature)")
        say(page, "Hi")
        answered(page, 2)
        assert server.engine.asked[-1][1].temperature == 1.5
        browser.call("Page.navigate", url="about:blank")
