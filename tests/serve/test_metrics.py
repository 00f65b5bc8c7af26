"""What Prometheus would read."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from serving import Running, read_until, serve, wait_for


def read(running: Running) -> dict[tuple, float]:
    reply = running.request("GET", "/metrics")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(reply.body.decode())
    return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}


def test_counts_of_what_was_done():
    with serve(slots=1) as running:
        running.post(prompt="four", max_tokens=6, ignore_eos=True)
        running.post(prompt="four", max_tokens=2, ignore_eos=True, stream=True)
        running.post(prompt="four", max_tokens=-1)
        running.request("GET", "/some/path/" + "x" * 50)
        endless = {"prompt": "x", "max_tokens": 16384, "ignore_eos": True, "stream": True}
        clients = [running.connect(**endless)]
        read_until(clients[0], b"data: ")  # it has the slot, so the others wait
        clients += [running.connect(**endless) for _ in range(2)]
        assert wait_for(lambda: running.service.live == 3)
        found = read(running)
        assert found["linnet_completions_total", "length"] == 2
        assert found["linnet_completions_active",] == 1 and found["linnet_completions_waiting",] == 2
        assert found["linnet_prompt_tokens_total",] == 9 and found["linnet_generated_tokens_total",] > 8
        assert found["linnet_http_responses_total", "/v1/completions", "200"] == 5
        assert found["linnet_http_responses_total", "/v1/completions", "400"] == 1
        assert found["linnet_http_responses_total", "404", "other"] == 1
        assert found["linnet_time_to_first_token_seconds_count",] == 3 and found["linnet_request_seconds_count",] == 2
        assert found["linnet_slots",] == 1 and found["linnet_state_bytes",] == running.service.engine.state_bytes
        for client in clients:
            client.close()
        assert wait_for(lambda: running.service.live == 0)
        found = read(running)
        assert found["linnet_completions_total", "cancelled"] == 3
        assert found["linnet_completions_active",] == found["linnet_completions_waiting",] == 0
        assert len([key for key in found if key[0] == "linnet_http_responses_total"]) < 10


def test_two_servers_do_not_mix(tiny: Running):
    with serve() as other:
        tiny.post(prompt="x", max_tokens=1)
        assert read(other)["linnet_generated_tokens_total",] == 0


def test_several_devices_answer_as_one_and_keep_conversations_where_they_are():
    texts = [f"{word} is the first of several words in a longer prompt" for word in ("one", "two", "three", "four")]
    ask = {"max_tokens": 12, "seed": 3, "ignore_eos": True, "return_token_ids": True}

    def answers(running: Running) -> list[list[int]]:
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda text: running.post(prompt=text, **ask).json["choices"][0], texts))
        return [reply["token_ids"] for reply in replies]

    with serve(slots=2) as running:
        expected = answers(running)
    with serve(slots=2, devices=2) as running:
        assert answers(running) == expected
        engines = running.service.worker._engines
        counts = [engine.counters.requests for engine in engines]
        assert sum(counts) == 4
        assert read(running)["linnet_slots",] == 4
        held = [engine.kept(np.frombuffer(texts[0].encode(), np.uint8).astype(np.int64)) for engine in engines]
        keeper = held.index(max(held))
        assert max(held) == 48 and min(held) == 0  # three chunks of 16 bytes
        running.post(prompt=texts[0] + ", and more", **ask)
        assert engines[keeper].counters.requests == counts[keeper] + 1
        assert read(running)["linnet_prefix_hits_total",] == 1
