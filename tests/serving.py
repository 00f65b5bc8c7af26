"""For tests of the server: real servers on free ports of this machine, over small random models."""

import contextlib
import functools
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from linnet.data import ByteTokenizer, Tokenizer
from linnet.inference import Engine, EngineProcess
from linnet.models import CausalLM, ModelConfig, build_model
from linnet.serve import ChatTemplate, ServeConfig, Server, Service, bind

LONG = 240  # seconds, after which something hangs: machines may be slow and busy
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Reply:
    status: int
    headers: dict
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def error(self) -> dict:
        """The error, whose shape is checked."""
        error = self.json["error"]
        assert self.headers["content-type"] == "application/json"
        assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
        return error


@dataclass
class Running:
    """A server that answers, and ways to ask it."""

    service: Service
    server: Server
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **settings):
        import openai  # takes a second: not while every worker collects all tests

        return openai.OpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, "timeout": LONG, **settings}
        )

    def request(self, method: str, path: str, body: object = None, headers: dict | None = None) -> Reply:
        """`body`: bytes as they are, or anything that becomes JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=LONG) as response:
                return Reply(response.status, {k.lower(): v for k, v in response.headers.items()}, response.read())
        except urllib.error.HTTPError as error:
            return Reply(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())

    def post(self, path: str = "/v1/completions", headers: dict | None = None, **body: object) -> Reply:
        return self.request("POST", path, {"model": "tiny", **body}, headers)

    def connect(self, receive_buffer: int | None = None, **body: object) -> socket.socket:
        """A connection on which a completion was asked for; nothing is read yet."""
        data = json.dumps({"model": "tiny", **body}).encode()
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.connect(("127.0.0.1", self.port))
        client.settimeout(LONG)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return client


def read_until(client: socket.socket, *needles: bytes) -> bytes:
    """What comes until one of these is in it, or the connection ends."""
    answer = b""
    while not any(needle in answer for needle in needles) and (part := client.recv(1 << 16)):
        answer += part
    return answer


def wait_for(condition: Callable[[], bool], seconds: float = LONG) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def run(service: Service, send_buffer: int | None = None) -> Iterator[Running]:
    """`send_buffer`: bytes that the system holds for a client who does not read."""
    listener, up = bind(service.settings), threading.Event()
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = Server(service, up.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert up.wait(LONG)
    try:
        yield Running(service, server, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(LONG)
        assert not thread.is_alive()


def tiny_model(vocab: int = 256, layout: str = "tnl+sglu x2") -> CausalLM:
    options = {name: {"num_heads": 2} for name in ("tnl", "attention") if name in layout}
    return build_model(ModelConfig(d_model=16, layout=layout, vocab_size=vocab, options=options, init_std=0.5), seed=0)


def _engine(vocab: int, layout: str, tokenizer: Tokenizer | None, sizes: dict) -> Engine:
    return Engine(tiny_model(vocab, layout), tokenizer, name="tiny", device="cpu", **sizes)


@contextlib.contextmanager
def serve(
    slots: int = 4,
    tokenizer: Tokenizer | None = None,
    template: str | None = TEMPLATE,
    with_tokenizer: bool = True,
    layout: str = "tnl+sglu x2",
    context_length: int | None = None,
    send_buffer: int | None = None,
    devices: int = 1,
    **settings: object,
) -> Iterator[Running]:
    """A server of a tiny model; `settings` are those of `ServeConfig`."""
    tokenizer = (tokenizer or ByteTokenizer()) if with_tokenizer else None
    sizes = {"slots": slots, "prefill_chunk": 16, "context_length": context_length, "prefix_cache": 0.01}
    make = functools.partial(_engine, 256 if tokenizer is None else tokenizer.vocab_size, layout, tokenizer, sizes)
    others = [EngineProcess(make, threads=torch.get_num_threads()) for _ in range(devices - 1)]
    engine = make()
    chat = None if template is None or tokenizer is None else ChatTemplate(template, tokenizer)
    service = Service(engine, ServeConfig(**{"port": 0, "grace": 1.0, **settings}), chat, others)
    with run(service, send_buffer) as running:
        yield running
