"""`linnet serve` as a person starts and stops it."""

import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from children import COMMAND, Child
from serving import TEMPLATE, tiny_model
from typer.testing import CliRunner

from linnet.cli import app
from linnet.data import ByteTokenizer
from linnet.runs.model import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model folder with a chat template."""
    model = tiny_model()
    path = save_model(tmp_path_factory.mktemp("models") / "tiny", model.config, model.state_dict(), ByteTokenizer())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def started(folder: Path):
    """started(*options, **environment) starts a server and gives its process, what clients need, and what it said."""
    processes = []

    def start(*options: str, **environment: str) -> tuple[Child, str, str]:
        command = ["serve", folder, "--port", "0", "--device", "cpu", *options]
        process = Child(COMMAND, *command, COLUMNS="200", **environment)
        processes.append(process)
        end = time.monotonic() + 300
        while not (match := re.search(r"http://\S+/v1", said := process.output())):
            assert process.poll() is None and time.monotonic() < end, said
            time.sleep(0.02)
        return process, match[0], said

    yield start
    for process in processes:
        process.kill()


def test_serves_a_folder_and_stops_at_sigterm_when_streams_have_ended(started, openai):
    options = ("--slots", "2", "--name", "my/model", "--grace", "300")
    process, url, _ = started(*options, LINNET_API_KEY="s3cret")
    client = openai.OpenAI(base_url=url, api_key="s3cret", max_retries=0)
    assert client.models.retrieve("my/model").id == "my/model"
    talk = [{"role": "user", "content": "x"}]
    assert client.chat.completions.create(model="my/model", messages=talk, max_tokens=3).usage.completion_tokens > 0
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="other", max_retries=0).models.list()
    ask = {"model": "my/model", "prompt": "x", "max_tokens": 1500, "stream": True}
    stream = client.completions.create(**ask, extra_body={"ignore_eos": True, "return_token_ids": True})
    first = next(stream)
    process.send_signal(signal.SIGTERM)
    tokens = [t for part in [first, *stream] for t in part.choices[0].token_ids]
    assert len(tokens) == 1500
    assert process.wait(300) == 0
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_warns_of_an_open_door_and_tells_streams_longer_than_the_grace_at_ctrl_c(started, openai):
    process, url, said = started("--host", "0.0.0.0", "--grace", "0.5")
    assert url.startswith("http://0.0.0.0:") and "LINNET_API_KEY" in said
    client = openai.OpenAI(base_url=url.replace("0.0.0.0", "127.0.0.1"), api_key="none", max_retries=0)
    body = client.models.with_raw_response.list().parse().to_json()
    assert json.loads(body)["data"][0]["id"] == "tiny"
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 16384, "stream": True}
    stream = client.completions.create(**ask, extra_body={"ignore_eos": True})
    next(stream)
    process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert process.wait(300) == 0
    assert "Traceback" not in process.output()
    assert "1 response may end within 0.5 s (--grace); Ctrl-C again does not wait" in process.output()


def test_a_second_ctrl_c_ends_running_responses(started, openai):
    process, url, _ = started("--grace", "1000")
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 16384, "stream": True}
    stream = client.completions.create(**ask, extra_body={"ignore_eos": True})
    next(stream)
    process.send_signal(signal.SIGINT)
    while "Ctrl-C again" not in process.output():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert process.wait(60) == 0
    assert "Traceback" not in process.output()


def test_all_that_is_wrong_with_the_command_line_comes_at_once_and_before_the_model():
    wrong = ["--port", "70000", "--queue", "-1", "--dtype", "int8", "--api-key", "zwölf", "--max-tokens", "0"]
    wrong += ["--state-dtype", "half", "--slots", "0", "--context-length", "-1", "--chat-template", "none.jinja"]
    done = CliRunner().invoke(app, ["serve", "nowhere", *wrong])
    assert done.exit_code == 2
    told = [
        "--port: ",
        "--queue: ",
        "--dtype: 'int8'",
        "--state-dtype: 'half'",
        "--api-key: ",
        "--max-tokens: ",
        "--slots: 0 ",
    ]
    told += ["--context-length: -1", "--chat-template none.jinja: ", "nowhere: "]
    for option in told:
        assert option in done.output
    assert "zwölf" not in done.output


def test_says_which_port_is_in_use_and_which_folder_is_none(folder: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", str(folder), "--port", port])
    assert done.exit_code == 2 and f"port: {port} " in done.output
    done = CliRunner().invoke(app, ["serve", "nowhere", "--port", "0"])
    assert done.exit_code == 2 and "nowhere: " in done.output
    done = CliRunner().invoke(app, ["serve", str(folder), "--host", "no.such.host.invalid"])
    assert done.exit_code == 2 and "host" in done.output
