"""`linnet serve`: a trained run behind OpenAI's HTTP API."""

import functools
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from linnet.options import AllowPlugins, options, parse_options, values_of


@dataclass(frozen=True, kw_only=True)
class Address:
    """Address, access and limits of the server: keys of `linnet.serve.ServeConfig`, which checks them.

    Attributes:
        host: Address to listen on; 0.0.0.0 lets other machines in.
        port: Port to listen on; 0 takes a free one.
        api_key: API key that clients must send. Other users can read command lines: prefer the variable.
        allowed_hosts: Also accept this name in the Host header; * accepts any; may be given again.
        queue: Completions that may wait for a slot; more are refused (429).
        max_tokens: Upper bound of max_tokens per completion.
        max_prompt_tokens: Upper bound of tokens per prompt.
        max_body: Upper bound of bytes per request.
        stream_timeout: Disconnect a client that reads nothing for this many seconds.
        grace: Seconds that running responses get at Ctrl-C or SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Annotated[str | None, typer.Option(envvar="LINNET_API_KEY", show_envvar=True)] = None
    allowed_hosts: Annotated[list[str] | None, typer.Option("--allowed-host")] = None
    queue: int = 256
    max_tokens: int = 16384
    max_prompt_tokens: int = 131072
    max_body: int = 4 << 20
    stream_timeout: float = 60.0
    grace: float = 30.0


@options
def serve(
    run: Path,
    *,
    address: Address,
    name: str | None = None,
    slots: int = 8,
    chat_template: Path | None = None,
    context_length: int | None = None,
    prefix_cache: float = 1.0,
    device: str = "auto",
    devices: int = 1,
    dtype: str | None = None,
    state_dtype: str = "float32",
    compile_: bool = False,
    allow_plugins: AllowPlugins = False,
) -> None:
    """Serve a trained model to any client of OpenAI's API.

    /v1/completions, /v1/chat/completions (with a chat template), /v1/models,
    /health, /metrics and /openapi.json; docs/serving.md has the details.
    Ctrl-C or SIGTERM lets running responses finish first, a second Ctrl-C
    does not.

    [bold]linnet serve runs/tnl-10m-0123456789ab[/]
    [bold]LINNET_API_KEY=... linnet serve RUN --host 0.0.0.0 --slots 64[/]
    [bold]OPENAI_BASE_URL=http://127.0.0.1:8000/v1[/] is what clients need

    Args:
        run: A run folder, as [bold]linnet train[/] prints it, or a model folder.
        name: Model name for clients (default: the folder's name).
        slots: Completions generated at once; each holds one state.
        chat_template: A Jinja file (default: chat_template.jinja in RUN, if it is there).
        context_length: Capacity of KV caches, for layers that have one (default: 4096).
        prefix_cache: GiB of states after beginnings of prompts, so that a conversation's
            next turn reads only what is new; answers stay the same; 0 for none.
        device: auto (the GPU if there is one), cpu or cuda.
        devices: GPUs of this machine, each with the whole model and its own slots.
        dtype: float32 or bfloat16 (default: bfloat16 on a GPU, else float32).
        state_dtype: float32 or bfloat16, of the recurrent states of slots; bfloat16 takes half
            their memory, and rounds a state when it is written (mixers of the delta rule, and Mamba-2).
        compile_: Compile the decoding step first.
    """
    from pydantic import SecretStr
    from rich.console import Console
    from rich.markup import escape

    from linnet.config import ConfigError, gather, not_installed, refuse
    from linnet.install import install_command
    from linnet.signals import Terminated

    if missing := not_installed(["fastapi", "uvicorn", "jinja2", "prometheus_client"]):
        raise ConfigError([f"{', '.join(missing)}: not installed; install them: {install_command('serve')}"], "serve")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    problems = [
        f"--{option}: {value} is {'below 1' if value < 1 else 'too large'}; give 1 to {1 << 31:,}"
        for option, value in {"slots": slots, "context-length": context_length, "devices": devices}.items()
        if value is not None and not 1 <= value <= 1 << 31
    ]
    if devices > 1 and device.startswith("cuda:"):
        problems.append(f"--devices: {devices} and --device {device} say two things; leave the number of the GPU out")
    if not run.exists():
        problems.append(f"{run}: not found; `linnet train` prints the folder of its run")
    if not 0 <= prefix_cache <= 1 << 20:
        problems.append(f"--prefix-cache: {prefix_cache} is not a number of GiB; give 0 for no cache, or for example 1")
    if chat_template is not None and not chat_template.is_file():
        problems.append(f"--chat-template {chat_template}: not found; give a Jinja template")
    for option, value in {"dtype": dtype, "state-dtype": state_dtype}.items():
        if value not in (None, "float32", "bfloat16"):
            problems.append(f"--{option}: {value!r} is unknown; use float32 or bfloat16")
    from linnet.serve import ServeConfig, bind

    key = None if address.api_key is None else SecretStr(address.api_key)
    with gather(problems):
        settings = parse_options(ServeConfig, values_of(address) | {"api_key": key})
    refuse(problems, "command line")
    listener = bind(settings)
    console.print(f"loading {escape(str(run))}")
    sizes = {"slots": slots, "context_length": context_length, "prefix_cache": prefix_cache}
    dtypes = dtype, state_dtype
    service = _load(run, settings, name, chat_template, sizes, device, devices, dtypes, compile_, allow_plugins)
    if service.template is not None and service.template.note:
        console.print(f"[bold yellow]warning[/] {escape(service.template.note)}")
    engine = service.engine
    host, listening = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if not settings.loopback and settings.api_key is None:
        what = "everyone who can reach this machine can use the model"
        console.print(f"[bold yellow]warning[/] {what}: set LINNET_API_KEY")

    where = str(engine.device) if devices == 1 else f"{devices} devices ({engine.device.type})"

    def started() -> None:
        console.print(
            f"[bold]{escape(engine.name)}[/] on {where}, {service.slots} slots of {engine.state_bytes:,} bytes: "
            f"http://{escape(shown)}:{listening}/v1"
        )

    def stopping(running: int) -> None:
        if running:
            responses = "1 response" if running == 1 else f"{running} responses"
            console.print(f"{responses} may end within {settings.grace:g} s (--grace); Ctrl-C again does not wait")

    import linnet.serve

    with suppress(KeyboardInterrupt, Terminated):
        linnet.serve.serve(service, listener, started, stopping)
    console.print("stopped")


def _load(run, settings, name, chat_template, sizes, device, devices, dtypes, compile_, allow_plugins):
    import torch

    from linnet.inference import Engine, EngineProcess
    from linnet.inference.engine import check_settings
    from linnet.serve import Service, load_chat_template

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, state_dtype = (None if dtype is None else getattr(torch, dtype) for dtype in dtypes)
    numbered = [device if devices == 1 or device == "cpu" else f"{device}:{number}" for number in range(devices)]
    check_settings(sizes["slots"], sizes["context_length"], None, numbered[-1])  # before the model is read
    make = functools.partial(
        Engine.of_run,
        run,
        **sizes,
        dtype=dtype,
        state_dtype=state_dtype,
        compile=compile_,
        allow_plugins=allow_plugins,
        **({} if name is None else {"name": name}),
    )
    threads = max(1, torch.get_num_threads() // devices)
    torch.set_num_threads(threads)
    engine = make(device=numbered[0])  # the others find what is wrong with the folder or the settings found here
    others = [EngineProcess(functools.partial(make, device=each), threads) for each in numbered[1:]]
    return Service(engine, settings, load_chat_template(run, engine.tokenizer, chat_template), others)
