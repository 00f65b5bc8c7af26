"""What is wrong with a request is said with the right status, in OpenAI's shape, and nothing else suffers."""

import asyncio
import errno
import http.client
import json
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import pytest
from serving import LONG, Reply, Running, read_until, serve, wait_for

from linnet.serve import _Transport, app
from linnet.serve.errors import ApiError
from linnet.serve.requests import ChatRequest, CompletionRequest, parse_json

TALK = [{"role": "user", "content": "x"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "fix"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "list"),
        (b'"x"', "str"),
        (b"null", "NoneType"),
        (b'{"model": "tiny", "temperature": NaN}', "JSON"),
        (b'{"model": "tiny", "temperature": -Infinity}', "JSON"),
        (b'{"model": "tiny", "prompt": "\xff"}', "UTF-8"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "JSON"),
        ('{"model": "tiny"}'.encode("utf-16"), "UTF-8"),
        (b'{"model": "tiny"} trailing', "JSON"),
    ],
)
def test_body_that_is_no_json_object(tiny: Running, body: bytes, fix: str):
    for path in ("/v1/completions", "/v1/chat/completions"):
        reply = tiny.request("POST", path, body)
        assert reply.status == 400 and reply.error["code"] == "invalid_json"
        assert fix in reply.error["message"]


@pytest.mark.parametrize(
    ("values", "param", "fix"),
    [
        ({"max_tokens": -1}, "max_tokens", "-1"),
        ({"max_tokens": 10**9}, "max_tokens", "--max-tokens"),
        ({"max_tokens": 10**30}, "max_tokens", "16384"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5"),
        ({"max_tokens": "9"}, "max_tokens", "'9'"),
        ({"max_tokens": True}, "max_tokens", "True"),
        ({"temperature": -0.1}, "temperature", "-0.1"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"top_p": 0}, "top_p", "0"),
        ({"top_p": 1.1}, "top_p", "1.1"),
        ({"top_k": -1}, "top_k", "-1"),
        ({"min_p": 1}, "min_p", "1"),
        ({"temperature": 1e300}, "temperature", "100"),
        ({"top_k": 1 << 31}, "top_k", "2147483648"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.01"),
        ({"repetition_penalty": 1e300}, "repetition_penalty", "100"),
        ({"n": 0}, "n", "0"),
        ({"n": 10**6}, "n", "1000000"),
        ({"seed": -1}, "seed", "-1"),
        ({"seed": 1 << 63}, "seed", "9223372036854775808"),
        ({"logprobs": 21}, "logprobs", "20"),
        (
            {"logprobs": 1, "n": 128, "max_tokens": 16384},
            "logprobs",
            "4,194,304 log-probabilities; one request may have",
        ),
        ({"logprobs": 20, "n": 128, "prompt": "x" * 1000, "echo": True}, "logprobs", "for fewer tokens (max_tokens)"),
        ({"logprobs": 20, "prompt": ["x" * 1000] * 100, "echo": True, "stream": True}, "logprobs", "2,097,152"),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stop": [1]}, "stop", "list"),
        ({"stop_token_ids": [256]}, "stop_token_ids", "255"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"prompt": []}, "prompt", "[]"),
        ({"prompt": ["a", 1]}, "prompt", "kinds"),
        ({"prompt": [[1], []]}, "prompt", "empty"),
        ({"prompt": [256]}, "prompt", "255"),
        ({"prompt": [-1]}, "prompt", "255"),
        ({"prompt": [[1], [1 << 80]]}, "prompt", "prompt[1]: [1208925819614629174706176] are not token ids"),
        (
            {"prompt": [1 << 64, -5]},
            "prompt",
            "[18446744073709551616, -5] are not token ids; use numbers from 0 to 255",
        ),
        ({"prompt": [1.5]}, "prompt", "kinds"),
        ({"prompt": {"a": 1}}, "prompt", "prompt"),
        ({"prompt": "a\0b"}, "prompt", "NUL"),
        ({"prompt": ["ok", "a\0b"]}, "prompt", "prompt[1]"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "'include_usage'"),
        ({"temprature": 1}, "temprature", "'temperature'"),
        ({"best_of": 3}, "best_of", "best_of"),
        ({"suffix": "end"}, "suffix", "suffix"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "repetition_penalty"),
        ({"presence_penalty": False}, "presence_penalty", "repetition_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "logit_bias"),
        ({"model": 3}, "model", "string"),
        ({"messages": TALK}, "messages", "messages"),
    ],
)
def test_wrong_value_of_a_completion(tiny: Running, values: dict, param: str, fix: str):
    reply = tiny.post(**{"prompt": "x", **values})
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param and reply.error["type"] == "invalid_request_error"
    assert fix in reply.error["message"] and param in reply.error["message"]


def test_log_probabilities_of_a_stream_are_sent_as_they_come_and_not_held():
    for stream, held in ((False, 3 * (7 + 5)), (True, 7)):
        request = CompletionRequest(model="tiny", n=3, stream=stream)
        prepared = app.Prepared(request)
        prepared.choices = [([1], request.sampling(i, 5, 0)) for i in range(3)]
        for most in (held, held - 1):
            with pytest.MonkeyPatch.context() as patch, pytest.raises(ApiError) if most < held else nullcontext():
                patch.setattr(app, "MOST_LOGPROBS_HELD", most)
                app._check_logprobs(prepared, "logprobs", 0, 7)


@pytest.mark.parametrize(
    ("values", "param", "fix"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "messages"),
        ({"messages": ["x"]}, "messages", "mapping"),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "'assistant'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "'text'"),
        ({"messages": TALK, "prompt": "x"}, "prompt", "prompt"),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "tools", "tools.0.function"),
        ({"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "template"),
        ({"messages": TALK, "tool_choice": "required"}, "tool_choice", "auto"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages", "assistant"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages", "role tool"),
        ({"messages": [{"role": "tool", "content": None}]}, "messages", "required"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}
                ]
            },
            "messages",
            "JSON object",
        ),
        ({"messages": TALK, "response_format": {"type": "json_object"}}, "response_format", "text"),
        ({"messages": TALK, "store": True}, "store", "store"),
        ({"messages": TALK, "service_tier": "priority"}, "service_tier", "one tier"),
        ({"messages": TALK, "reasoning_effort": "high"}, "reasoning_effort", "chat_template_kwargs"),
        ({"messages": TALK, "audio": {"voice": "ash", "format": "wav"}}, "audio", "plain text"),
        ({"messages": TALK, "top_logprobs": 3}, "top_logprobs", "logprobs: true"),
        ({"messages": TALK, "logprobs": True, "top_logprobs": 20, "n": 7}, "top_logprobs", "or stream"),
        ({"messages": TALK, "logprobs": 3}, "logprobs", "boolean"),
        ({"messages": TALK, "max_tokens": 0}, "max_tokens", "0"),
        ({"messages": TALK, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "messages", "NUL"),
    ],
)
def test_wrong_value_of_a_chat(tiny: Running, values: dict, param: str, fix: str):
    reply = tiny.post("/v1/chat/completions", **values)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param and fix in reply.error["message"]


def test_all_problems_come_at_once_and_long_values_are_cut(tiny: Running):
    reply = tiny.post(prompt="x" * 10_000 + "\0", max_tokens=-1, top_p=7, seed="a" * 100_000, stop=[1])
    message = reply.error["message"]
    assert all(key in message for key in ("max_tokens", "top_p", "seed", "stop")) and len(message) < 5000
    many = tiny.post(**{f"key{i}": i for i in range(100_000)})
    assert many.status == 400 and "100001 keys" in many.error["message"]
    forty = tiny.post(**{f"key{i}": i for i in range(40)})
    assert " 30 " in forty.error["message"]


def test_number_that_overflows(tiny: Running):
    reply = tiny.request("POST", "/v1/completions", b'{"model": "tiny", "prompt": "x", "temperature": 1e999}')
    assert reply.status == 400 and reply.error["param"] == "temperature"


def test_neutral_values_and_nulls_ask_for_nothing(tiny: Running):
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "me"}
    completion = {"best_of": 2, "n": 2, "suffix": "", "stop": None, "seed": None, "logprobs": None, "stream": None}
    completion |= {"temperature": None, "top_p": None, "max_tokens": None, "stream_options": None}
    assert tiny.post(prompt="x", ignore_eos=True, **neutral, **completion).json["usage"]["completion_tokens"] == 32
    chat = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "store": False, "n": None}
    chat |= {"service_tier": "auto", "verbosity": "medium", "reasoning_effort": "none", "modalities": ["text"]}
    chat |= {"metadata": {"a": "b"}, "safety_identifier": "me", "prompt_cache_key": "k", "prompt_cache_options": {}}
    chat |= {"prompt_cache_retention": "24h", "parallel_tool_calls": False, "audio": None, "prediction": None}
    reply = tiny.post("/v1/chat/completions", messages=TALK, max_tokens=3, **neutral, **chat)
    assert reply.status == 200, reply.body


def test_every_key_of_openai_is_known():
    types = pytest.importorskip("openai.types")
    for known, theirs in (
        (CompletionRequest, types.completion_create_params.CompletionCreateParamsBase),
        (ChatRequest, types.chat.completion_create_params.CompletionCreateParamsBase),
    ):
        assert set(theirs.__annotations__) <= set(known.model_fields)


EMPTY = {"annotations": [], "refusal": None, "audio": None, "function_call": {}, "reasoning": ""}


def test_turns_of_other_servers_are_taken_back(tiny: Running):
    ask = {"max_tokens": 3, "seed": 0, "return_token_ids": True}
    parts = [{"type": "text", "text": "b", "annotations": []}]
    talk = [*TALK, {"role": "assistant", "content": "b"}, *TALK]
    sent = [*TALK, {"role": "assistant", "content": parts, **EMPTY, "tool_calls": [], "reasoning_content": None}, *TALK]
    plain, copied = (tiny.post("/v1/chat/completions", messages=messages, **ask) for messages in (talk, sent))
    assert plain.status == copied.status == 200, copied.body
    assert plain.json["choices"] == copied.json["choices"]
    assert plain.json["usage"]["prompt_tokens"] == copied.json["usage"]["prompt_tokens"]


@pytest.mark.parametrize("key", [*EMPTY, "reasoning_content"])
def test_turns_with_more_than_text_are_refused_by_name(key, tiny: Running):
    for value in ("said", [{"id": "1"}], {"name": "f"}, False, 0):
        reply = tiny.post("/v1/chat/completions", messages=[*TALK, {"role": "assistant", "content": "b", key: value}])
        assert reply.status == 400 and f"{key}: " in reply.error["message"] and "leave it out" in reply.error["message"]


def test_unknown_paths_models_and_methods(tiny: Running):
    assert tiny.post(model="gpt-4", prompt="x").status == 404
    for method, path, status in [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/docs", 404),
        ("GET", "/%ff/../v1", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ]:
        reply = tiny.request(method, path, b"{}" if method == "POST" else None)
        assert reply.status == status and reply.error["code"] in ("not_found", "method_not_allowed", "model_not_found")
        assert (status == 405) == ("allow" in reply.headers)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_a_page_in_a_browser_cannot_ask(tiny: Running, kind: str):
    reply = tiny.post(headers={"content-type": kind}, prompt="x")
    assert reply.status == 415 and "application/json" in reply.error["message"]
    reply = tiny.post(headers={"content-encoding": "gzip"}, prompt="x")
    assert reply.status == 415 and "'gzip' is not supported" in reply.error["message"]
    reply = tiny.post(headers={"host": "evil.example:80"}, prompt="x")
    assert reply.status == 403 and "evil.example" in reply.error["message"]
    assert tiny.post(headers={"host": "LOCALHOST:1", "content-type": "application/json; charset=utf-8"}).status == 200


def test_key_is_asked_for_on_v1_alone():
    with serve(api_key="s3cret", allowed_hosts=["models.example"]) as locked:
        for given in (None, "s3cret", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "Bearer \xfc", "Bearer "):
            reply = locked.post(headers=None if given is None else {"authorization": given}, prompt="x")
            assert reply.status == 401 and reply.error["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer" and "s3cret" not in reply.error["message"]
        right = {"authorization": "Bearer s3cret"}
        assert locked.post(headers=right, prompt="x", max_tokens=1).status == 200
        assert locked.request("GET", "/v1/unknown").status == 401
        assert locked.request("GET", "/health").status == 200 and locked.request("GET", "/metrics").status == 200
        assert locked.request("GET", "/health", headers={"host": "models.example"}).status == 200
        page = locked.request("GET", "/openapi.json").json
        assert page["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
        assert "s3cret" not in repr(locked.service.settings)


def test_size_and_slowness_of_a_request():
    with serve(max_body=2000) as small:
        reply = small.post(prompt="x" * 2000)
        assert reply.status == 413 and "2,000 bytes" in reply.error["message"]
        # Without a declared length: chunked, and refused where it passes the limit.
        connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=LONG)
        chunks = [b'{"model": "tiny", "prompt": "', *[b"x" * 500] * 10, b'"}']
        connection.request(
            "POST", "/v1/completions", iter(chunks), {"content-type": "application/json"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
        assert small.post(prompt="x", max_tokens=1).status == 200
        assert small.service._entering == 0
    began = time.monotonic()
    with serve(body_timeout=0.5) as hasty:
        with socket.create_connection(("127.0.0.1", hasty.port), timeout=LONG) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b'Content-Length: 100\r\n\r\n{"model"'
            )
            answer = read_until(client, b"}}")
        assert b"408" in answer.split(b"\r\n")[0]
        assert time.monotonic() - began < 25  # not after the usual 30
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert hasty.service._entering == 0


def send(port: int, headers: str, parts: Iterable[bytes], seconds: float = 0.0) -> bytes:
    """Returns the answer to a request whose body is sent in parts, which the server may answer before the last."""
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}{headers}\r\n".encode())
        for part in parts:
            client.sendall(part)
            time.sleep(seconds)
        return read_until(client, b"}}")


@pytest.mark.parametrize("connection", ["Connection: close\r\n", ""])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("count", [1, 64])
def test_a_client_that_sends_on_while_it_is_answered_sees_the_answer(count: int, chunked: bool, connection: str):
    with serve(max_body=2000) as small:
        part = b"x" * ((8 << 20) // count)
        framed = b"%x\r\n%s\r\n" % (len(part), part) if chunked else part
        headers = "Transfer-Encoding: chunked\r\n" if chunked else f"Content-Length: {len(part) * count}\r\n"
        for seconds in (0.0, 0.001):
            answer = send(small.port, headers + connection, [framed] * count + [b"0\r\n\r\n"] * chunked, seconds)
            assert answer.startswith(b"HTTP/1.1 413 ") and b"2,000 bytes" in answer
            assert b"connection: close" in answer.lower().partition(b"\r\n\r\n")[0]
    with serve(api_key="s3cret") as locked:  # as for every other answer that comes before the end of a body
        answer = send(locked.port, f"Content-Length: {4 << 20}\r\n{connection}", [b"x" * (4 << 20)])
        assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer.lower()
        answer = send(locked.port, f"X: {'x' * (8 << 20)}\r\n{connection}", [])
        assert answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" in answer.lower()


def test_a_client_that_never_stops_sending_is_disconnected(monkeypatch):
    def forever(port: int, part: bytes, seconds: float) -> tuple[int, float]:
        """Returns the bytes that were sent before the connection broke, and the time that took."""
        sent, began = 0, time.monotonic()

        def parts() -> Iterator[bytes]:
            nonlocal sent
            while time.monotonic() - began < LONG:
                yield b"%x\r\n%s\r\n" % (len(part), part)
                sent += len(part)

        with pytest.raises(OSError):  # noqa: PT011 - a reset or a broken pipe
            send(port, "Transfer-Encoding: chunked\r\n", parts(), seconds)
        return sent, time.monotonic() - began

    monkeypatch.setattr("linnet.serve.MOST_DRAINED", 4 << 20)
    with serve(max_body=2000, body_timeout=1.0) as small:
        sent, _ = forever(small.port, b"x" * 65536, 0.0)
        assert 2 << 20 < sent < 40 << 20  # the system's buffers hold some MB
        _, seconds = forever(small.port, b"x" * 4000, 0.05)
        assert seconds < 20
        assert wait_for(lambda: not small.server.server_state.connections)
        assert small.post(prompt="x", max_tokens=1).status == 200
        with socket.create_connection(("127.0.0.1", small.port), timeout=LONG) as idle:
            idle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\nx")
            assert read_until(idle).startswith(b"HTTP/1.1 413 ")  # to the end of the connection
            assert wait_for(lambda: not small.server.server_state.connections, 20)


def test_a_client_that_reset_its_connection_is_not_waited_for():
    class Gone:
        closed = False

        def is_closing(self) -> bool:
            return self.closed

        def write_eof(self) -> None:
            raise OSError(errno.ENOTCONN, "not connected")

        def close(self) -> None:
            self.closed = True

    async def main() -> None:
        transport = _Transport(gone := Gone(), asyncio.get_running_loop(), lambda: True, 1, 1.0)
        transport.close()
        assert gone.closed and transport.is_closing()

    asyncio.run(main())


def test_length_is_limited_by_the_server_and_by_a_cache():
    def code(reply: Reply) -> str:
        assert reply.status == 400
        return reply.error["code"]

    with serve(max_prompt_tokens=20, max_tokens=30) as short:
        assert code(short.post(prompt="x" * 21)) == "context_length_exceeded"
        assert code(short.post(prompt="x", max_tokens=31)) == "context_length_exceeded"
        assert short.post(prompt="x" * 20, max_tokens=30).status == 200
    with serve(layout="(tnl+sglu attention+swiglu) x1", context_length=40) as cached:
        assert code(cached.post(prompt="x" * 40)) == "context_length_exceeded"
        reply = cached.post(prompt="x" * 30, max_tokens=11)
        assert code(reply) == "context_length_exceeded" and "at most 10" in reply.error["message"]
        whole = cached.post(prompt="x" * 30, max_tokens=10, ignore_eos=True).json
        assert whole["usage"]["total_tokens"] == 40
        cut = cached.post(prompt="x" * 30, ignore_eos=True).json  # 16 by default, as far as the cache goes
        assert cut["usage"]["total_tokens"] == 40


def test_engine_that_fails_answers_and_goes_on(tiny: Running):
    """A failure in a round: the requests in it get a 500, or an event where their stream has begun."""
    with serve(slots=2) as broken:
        engine = broken.service.engine
        step, failing = engine._decoder.choose, []

        def choose(kind):
            if failing:
                raise RuntimeError("the GPU fell off")
            return step(kind)

        engine._decoder.choose = choose
        client = broken.connect(prompt="x", stream=True, max_tokens=16384, ignore_eos=True)
        assert b"data: " in read_until(client, b"data: ")
        failing.append(True)
        answer = read_until(client, b"[DONE]", b"0\r\n\r\n")
        client.close()
        assert b"the GPU fell off" in answer and b"[DONE]" not in answer
        reply = broken.post(prompt="x")
        assert reply.status == 500 and reply.error["type"] == "server_error" and reply.error["code"] == "engine_error"
        failing.clear()
        assert broken.post(prompt="x", max_tokens=2).status == 200
        assert wait_for(lambda: broken.service.live == 0) and broken.request("GET", "/health").status == 200


def test_bug_of_ours_is_a_500_without_its_details():
    def broken() -> bytes:
        raise KeyError("a secret")

    with serve() as running:
        running.service.metrics.text = broken
        reply = running.request("GET", "/metrics")
        assert reply.status == 500 and reply.error["code"] == "internal_error" and b"secret" not in reply.body
        assert running.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),  # TLS
        b"GET /health\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http(tiny: Running, sent: bytes):
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=LONG) as client:
        client.sendall(sent)
        answer = read_until(client, b"}}")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["code"] == "invalid_http"
    assert tiny.request("GET", "/health").status == 200


def test_bytes_behind_a_request_do_not_harm_its_stream(tiny: Running):
    client = tiny.connect(prompt="x", max_tokens=300, stream=True, ignore_eos=True)
    read_until(client, b"data: ")
    client.sendall(b"\x00garbage\r\n\r\n")
    assert b"data: [DONE]" in read_until(client, b"[DONE]")
    client.close()


def test_headers_that_do_not_arrive_are_not_waited_for():
    with serve(header_timeout=1.0) as hasty:
        half = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        clients = [socket.create_connection(("127.0.0.1", hasty.port), timeout=LONG) for _ in range(20)]
        for number, client in enumerate(clients):
            client.sendall(half if number else b"")
        for client in clients:
            answer = read_until(client, b"never")
            assert answer.startswith(b"HTTP/1.1 408") and b"headers did not arrive" in answer
        assert wait_for(lambda: not hasty.server.server_state.connections)
        with socket.create_connection(("127.0.0.1", hasty.port), timeout=LONG) as client:  # a connection that is kept
            for _ in range(2):
                client.sendall(half + b"\r\n")
                assert b"200 OK" in read_until(client, b'"ok"}')
            client.sendall(half)
            assert b"408" in read_until(client, b"never")
        assert hasty.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": [' + b"[]," * 1_100_000 + b"[]]}", b"[" * 3_500_000, b"[" * 70_000 + b'"' + b'\\"' * 2_000_000],
    ids=["wide", "deep", "with a text of quotes that does not end"],
)
def test_a_body_of_many_lists_is_refused_before_it_is_parsed(body: bytes):
    start = time.process_time()
    with pytest.raises(ApiError, match="lists and objects"):
        parse_json(body)
    assert time.process_time() - start < 1
    text = "[{" * 100_000 + '"'
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_null_is_an_empty_turn_of_the_assistant(tiny: Running):
    first, last = {"role": "user", "content": "x"}, {"role": "user", "content": "y"}
    counts = []
    for content in (None, "", []):
        talk = [first, {"role": "assistant", "content": content, "refusal": None, "tool_calls": None}, last]
        reply = tiny.post("/v1/chat/completions", messages=talk, max_tokens=1)
        assert reply.status == 200, reply.body
        counts.append(reply.json["usage"]["prompt_tokens"])
    assert len(set(counts)) == 1
    assert tiny.post("/v1/chat/completions", messages=[{"role": "assistant"}], max_tokens=1).status == 400
