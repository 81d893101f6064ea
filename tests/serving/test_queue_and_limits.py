"""The queue, the rates, who may come in, and what is counted."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_makers import make_model, running

from patience import PATIENCE_SECONDS, wait_for
from penstock.core.errors import ConfigError
from penstock.use.serving import ServeSettings
from penstock.use.serving.admission import Admission
from penstock.use.serving.guard import Rates, is_loopback_name
from penstock.use.serving.refusals import Refusal


def test_places_are_given_in_order():
    async def scene() -> list[str]:
        queue, log = Admission(ServeSettings(sequences=2)), []

        async def come(name: str, places: int) -> None:
            await queue.enter(places)
            log.append(name)

        await come("first", 2)
        # The third would fit before the second does, but came after it.
        tasks = [asyncio.create_task(come("second", 2)), asyncio.create_task(come("third", 1))]
        await asyncio.sleep(0)
        queue.leave()
        await asyncio.sleep(0)
        assert log == ["first"]
        assert queue.waiting == 2
        # One place is free now, but it is the second's.
        tasks.append(asyncio.create_task(come("fourth", 1)))
        await asyncio.sleep(0)
        assert queue.waiting == 3
        queue.leave()
        await asyncio.sleep(0.01)
        assert log == ["first", "second"]
        queue.leave(2)
        await asyncio.gather(*tasks)
        return log

    assert asyncio.run(scene()) == ["first", "second", "third", "fourth"]


def test_who_leaves_the_queue_gives_back_what_they_were_just_given():
    async def scene() -> None:
        queue = Admission(ServeSettings(sequences=1))
        await queue.enter(1)
        waits, next_one = asyncio.create_task(queue.enter(1)), asyncio.create_task(queue.enter(1))
        await asyncio.sleep(0)
        queue.leave()
        waits.cancel()
        await asyncio.wait_for(next_one, 1)
        gone = asyncio.create_task(queue.enter(1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert queue.waiting == 0
        queue.leave()
        await asyncio.wait_for(queue.enter(1), 1)

    asyncio.run(scene())


def test_a_full_queue_a_slow_one_and_one_that_closes():
    async def scene() -> None:
        queue = Admission(ServeSettings(sequences=1, waiting=1, waiting_seconds=0.05))
        await queue.enter(1)
        waits = asyncio.create_task(queue.enter(1))
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="1 requests are already waiting") as full:
            await queue.enter(1)
        with pytest.raises(Refusal, match="no place within"):
            await waits
        assert (full.value.status, full.value.headers["retry-after"]) == (429, "1")
        waits = asyncio.create_task(queue.enter(1))
        await asyncio.sleep(0)
        queue.close()
        with pytest.raises(Refusal, match="the server is stopping") as stopping:
            await waits
        assert stopping.value.status == 503

    asyncio.run(scene())


def test_buckets_fill_again_and_forget():
    now = [0.0]
    rates = Rates(ServeSettings(requests_per_second=2, burst=3), lambda: now[0])
    for _ in range(3):
        rates.take("a")
    with pytest.raises(Refusal, match="more than 2 requests per second"):
        rates.take("a")
    rates.take("b")
    now[0] = 0.5
    rates.take("a")
    with pytest.raises(Refusal, match="retry later"):
        rates.take("a")
    for number in range(10_000):
        rates.take(f"address {number}")
    assert len(rates._buckets) <= 4096
    # Who has just used up what they may is not forgotten for it.
    for _ in range(2):
        rates.take("address 9999")
    with pytest.raises(Refusal, match="retry later"):
        rates.take("address 9999")


def test_requests_of_one_client_at_a_time():
    rates = Rates(ServeSettings(requests_per_client=1))
    with rates.one_more("a"):
        with pytest.raises(Refusal, match="more than 1 requests at a time"), rates.one_more("a"):
            pass
        with rates.one_more("b"):
            pass
    with rates.one_more("a"):
        pass


def test_a_busy_server_refuses_and_serves_those_who_wait(tokenizer):
    with running(make_model(tokenizer, seconds=0.01), sequences=2, waiting=2) as server:
        with ThreadPoolExecutor(8) as pool:
            answers = list(
                pool.map(lambda _: server.post(prompt="forever", max_tokens=40), range(8))
            )
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200] * 4 + [429] * 4
        assert {
            answer.headers["retry-after"] for answer in answers if answer.status_code == 429
        } == {"10"}
        assert {
            answer.json()["error"]["code"] for answer in answers if answer.status_code == 429
        } == {"queue_full"}
        assert server.engine.most == 2
        assert server.metric("requests_waiting") == 0


def test_the_client_of_openai_comes_back_when_told(tokenizer):
    with running(make_model(tokenizer), requests_per_second=2, burst=1) as server:
        with server.openai(max_retries=3) as client:
            for _ in range(2):
                assert client.completions.create(model="tiny", prompt="a").choices[0].text
        with (
            server.openai() as client,
            pytest.raises(openai.RateLimitError, match="2 requests per second"),
        ):
            client.completions.create(model="tiny", prompt="a")
        # The page and health are not counted.
        assert {server.http.get("/health").status_code for _ in range(5)} == {200}


def test_keys(tokenizer):
    with running(make_model(tokenizer), api_keys=("secret-1", "secret-2")) as server:
        for key in ("secret-1", "secret-2"):
            with server.openai(api_key=key) as client:
                assert client.models.list().data
        for key in ("secret-3", "secret-", "schlüssel"):
            answer = server.http.get(
                "/v1/models", headers={"authorization": f"Bearer {key}".encode()}
            )
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert server.post(prompt="a").status_code == 401
        assert server.http.get("/metrics").status_code == 401
        assert (
            server.http.get("/metrics", headers={"authorization": "bearer secret-1"}).status_code
            == 200
        )
        assert [server.http.get(path).status_code for path in ("/", "/health")] == [200, 200]
        # With keys the server may have any name.
        assert server.http.get("/health", headers={"host": "models.example.org"}).status_code == 200


def test_wrong_keys_use_up_the_rate_of_their_address(tokenizer):
    with running(
        make_model(tokenizer), api_keys=("secret",), requests_per_second=0.1, burst=3
    ) as server:
        codes = [server.http.get("/v1/models").status_code for _ in range(5)]
        assert codes == [401, 401, 401, 429, 429]
        assert (
            server.http.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code
            == 200
        )


def test_other_names_for_this_machine_are_refused(server):
    answer = server.http.get("/v1/models", headers={"host": "evil.example.org"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "host")
    assert server.http.get("/", headers={"host": "evil.example.org"}).status_code == 403
    assert "access-control-allow-origin" not in server.http.get("/v1/models").headers
    assert server.http.options("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    ("host", "mine"),
    [
        ("localhost", 1),
        ("LOCALHOST:80", 1),
        ("127.0.0.1:8000", 1),
        ("[::1]:8000", 1),
        ("[::1]", 1),
        ("a.localhost", 1),
        ("", 0),
        ("10.0.0.1", 0),
        ("localhost.evil.org", 0),
        ("127.0.0.1.evil.org", 0),
        ("[::2]", 0),
    ],
)
def test_loopback_names(host, mine):
    assert is_loopback_name(host) == bool(mine)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_other_addresses_demand_a_key(host):
    with pytest.raises(ConfigError, match="there is no API key; set api_keys"):
        ServeSettings(host=host)
    assert ServeSettings(host=host, api_keys=("k",)).host == host


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sequences": 0}, "serve.sequences must be at least 1, got 0"),
        ({"waiting": -1}, "serve.waiting must be at least 0"),
        ({"body_seconds": 0}, "serve.body_seconds"),
        ({"port": 70_000}, "at most 65535"),
        ({"api_keys": ("",)}, "empty or not ASCII"),
    ],
)
def test_settings_are_checked(settings, match):
    with pytest.raises(ConfigError, match=match):
        ServeSettings(**settings)


def test_a_port_that_is_taken(server, tokenizer):
    from penstock.use.serving import Server

    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*Address.*already"):
        Server(make_model(tokenizer), ServeSettings(port=port))


def test_metrics(tokenizer):
    with running(make_model(tokenizer)) as server:
        server.post(prompt="abc", max_tokens=5)
        server.post(prompt="abc", n=0)
        server.http.get("/nowhere/at/all")
        text = server.http.get("/metrics").text
        assert (
            server.http.get("/metrics")
            .headers["content-type"]
            .startswith("text/plain; version=0.0.4")
        )
    families = list(text_string_to_metric_families(text))
    found = {
        (one.name, *sorted(one.labels.items())): one.value
        for each in families
        for one in each.samples
    }
    for name, labels, value in (
        ("requests_total", {"path": "/v1/completions", "code": "200"}, 1),
        ("requests_total", {"path": "/v1/completions", "code": "400"}, 1),
        ("requests_total", {"path": "other", "code": "404"}, 1),
        ("prompt_tokens_total", {}, 4),
        ("completion_tokens_total", {}, 5),
        ("dropped_tokens_total", {}, 0),
        ("cancelled_total", {}, 0),
        ("requests_in_flight", {}, 1),
        ("sequences_running", {}, 0),
        ("requests_waiting", {}, 0),
        ("first_token_seconds_count", {}, 1),
        ("request_seconds_bucket", {"le": "+Inf"}, 3),
    ):
        assert found[(f"penstock_{name}", *sorted(labels.items()))] == value
    assert len(families) == len({one.name for one in families}) == 10
    assert not [name for name, *_ in found if name.endswith("_created")]


def leave(server, *, stream: bool, after: float = 0.2) -> None:
    """Ask, and close the connection."""
    body = {"model": "tiny", "prompt": "forever", "max_tokens": 200, "stream": stream}
    with httpx.Client(base_url=server.url) as client:
        if not stream:
            with pytest.raises(httpx.ReadTimeout, match="timed out"):
                client.post("/v1/completions", json=body, timeout=after)
            return
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_text())


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_is_cancelled(tokenizer, stream):
    with running(make_model(tokenizer, seconds=0.05)) as server:
        leave(server, stream=stream)
        steps = server.engine.steps
        wait_for(lambda: server.engine.cancelled == [0])
        assert server.engine.steps <= steps + 3
        wait_for(lambda: server.metric("cancelled_total") == 1)
        assert server.metric("requests_in_flight") == 1
        assert not server.engine.running


def test_who_leaves_the_queue_never_runs(tokenizer):
    with (
        running(make_model(tokenizer, seconds=0.02), sequences=1) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(server.post, prompt="forever", max_tokens=60)
        wait_for(lambda: server.engine.running)
        leave(server, stream=False)
        wait_for(lambda: server.service.admission.waiting == 0)
        assert first.result().json()["usage"]["completion_tokens"] == 60
        assert len(server.engine.asked) == 1


def test_stopping(tokenizer):
    """New and waiting requests are refused; replies within the grace are complete; others end with
    an error.
    """
    grace = 3
    # Steps take long until the server is asked to stop, so that all three run until then.
    model = make_model(tokenizer, seconds=0.5, context_length=1 << 20)
    with (
        running(model, sequences=3, grace_seconds=grace, max_tokens=1 << 19) as server,
        ThreadPoolExecutor(9) as pool,
    ):
        short = pool.submit(server.post, prompt="forever", max_tokens=30)
        long = pool.submit(server.post, prompt="forever", max_tokens=1 << 19)
        with httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS) as client:
            body = {"model": "tiny", "prompt": "forever", "max_tokens": 1 << 19, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                wait_for(lambda: len(server.engine.running) == 3)
                waits = pool.submit(server.post, prompt="a")
                wait_for(lambda: server.service.admission.waiting == 1)
                begun = time.monotonic()
                server.ask_to_stop()
                server.engine.seconds = 0.001
                text = "".join(stream.iter_text())
        assert (waits.result().status_code, waits.result().json()["error"]["code"]) == (
            503,
            "stopping",
        )
        assert waits.result().headers["retry-after"] == "10"
        assert short.result().json()["usage"]["completion_tokens"] == 30
        assert long.result().status_code == 503
        assert "[DONE]" not in text
        assert '"the server is stopping and cut the reply"' in text.splitlines()[-2]
        assert time.monotonic() - begun >= grace
        with pytest.raises(httpx.ConnectError, match="refused"):
            server.post(prompt="a")
