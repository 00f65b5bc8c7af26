"""`linnet serve`: a trained run behind OpenAI's HTTP API."""

from pathlib import Path
from typing import Annotated

import typer

from linnet.cli.allow import ALLOW_PLUGINS


def serve(
    run: Annotated[Path, typer.Argument(help="A run folder, as [bold]linnet train[/] prints it, or a model folder.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Model name for clients.", show_default="the folder's name")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key that clients must send. Other users can read command lines: prefer the variable.",
            envvar="LINNET_API_KEY",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Also accept this name in the Host header; * accepts any; may be given again.", show_default=False
        ),
    ] = None,
    slots: Annotated[int, typer.Option(help="Completions generated at once; each holds one state.")] = 8,
    queue: Annotated[int, typer.Option(help="Completions that may wait for a slot; more are refused (429).")] = 256,
    max_tokens: Annotated[int, typer.Option(help="Upper bound of max_tokens per completion.")] = 16384,
    max_prompt_tokens: Annotated[int, typer.Option(help="Upper bound of tokens per prompt.")] = 131072,
    max_body: Annotated[int, typer.Option(help="Upper bound of bytes per request.")] = 4 << 20,
    stream_timeout: Annotated[
        float, typer.Option(help="Disconnect a client that reads nothing for this many seconds.")
    ] = 60.0,
    grace: Annotated[float, typer.Option(help="Seconds that running responses get at Ctrl-C or SIGTERM.")] = 30.0,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file.", show_default="chat_template.jinja in RUN, if it is there")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Capacity of KV caches, for layers that have one.", show_default="4096")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="bfloat16 on a GPU, else float32")
    ] = None,
    compile_: Annotated[bool, typer.Option("--compile", help="Compile the decoding step first.")] = False,
    allow_plugins: Annotated[bool, typer.Option("--allow-plugins", help=ALLOW_PLUGINS)] = False,
) -> None:
    """Serve a trained model to any client of OpenAI's API.

    /v1/completions, /v1/chat/completions (with a chat template), /v1/models,
    /health, /metrics and /openapi.json; docs/serving.md has the details.
    Ctrl-C or SIGTERM lets running responses finish first.

    [bold]linnet serve runs/tnl-10m-0123456789ab[/]
    [bold]LINNET_API_KEY=... linnet serve RUN --host 0.0.0.0 --slots 64[/]
    [bold]OPENAI_BASE_URL=http://127.0.0.1:8000/v1[/] is what clients need
    """
    from rich.console import Console
    from rich.markup import escape

    from linnet.config import ConfigError, not_installed
    from linnet.install import install_command

    if missing := not_installed(["fastapi", "uvicorn", "jinja2", "prometheus_client"]):
        raise ConfigError([f"{', '.join(missing)}: not installed; install them: {install_command('serve')}"], "serve")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    problems = [
        f"--{option}: {value} is {'below 1' if value < 1 else 'too large'}; give 1 to {1 << 31:,}"
        for option, value in {"slots": slots, "context-length": context_length}.items()
        if value is not None and not 1 <= value <= 1 << 31
    ]
    if not run.exists():
        problems.append(f"{run}: not found; `linnet train` prints the folder of its run")
    if chat_template is not None and not chat_template.is_file():
        problems.append(f"--chat-template {chat_template}: not found; give a Jinja template")
    settings = _settings(
        {
            "host": host,
            "port": port,
            "api_key": api_key,
            "allowed_hosts": allowed_host or [],
            "queue": queue,
            "max_tokens": max_tokens,
            "max_prompt_tokens": max_prompt_tokens,
            "max_body": max_body,
            "stream_timeout": stream_timeout,
            "grace": grace,
        },
        dtype,
        problems,
    )
    from linnet.serve import bind

    listener = bind(settings)
    console.print(f"loading {escape(str(run))}")
    service = _load(run, settings, name, chat_template, slots, context_length, device, dtype, compile_, allow_plugins)
    engine = service.engine
    address, listening = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    if not settings.loopback and settings.api_key is None:
        console.print(
            "[bold yellow]warning[/] everyone who can reach this machine can use the model: set LINNET_API_KEY"
        )

    def started() -> None:
        console.print(
            f"[bold]{escape(engine.name)}[/] on {engine.device}, {engine.slots} slots of {engine.state_bytes:,} bytes: "
            f"http://{escape(shown)}:{listening}/v1"
        )

    import linnet.serve

    try:
        linnet.serve.serve(service, listener, started)
    except KeyboardInterrupt:
        pass
    console.print("stopped")


def _settings(values: dict, dtype: str | None, problems: list[str]):
    """Returns the server's settings.

    Args:
        problems: of the other options, to be reported with those of the settings.

    Raises:
        ConfigError: all problems, under the names of the options.
    """
    from pydantic import SecretStr

    from linnet.config import ConfigError, parse
    from linnet.serve import ServeConfig

    if dtype not in (None, "float32", "bfloat16"):
        problems.append(f"--dtype: {dtype!r} is unknown; use float32 or bfloat16")
    if values["api_key"] is not None:
        values["api_key"] = SecretStr(values["api_key"])
    try:
        settings = parse(ServeConfig, values)
    except ConfigError as error:
        names = [problem.partition(":") for problem in error.problems]
        problems += [f"--{key.replace('_', '-')}:{rest}" for key, _, rest in names]
    if problems:
        raise ConfigError(problems, "command line")
    return settings


def _load(run, settings, name, chat_template, slots, context_length, device, dtype, compile_, allow_plugins):
    import torch

    from linnet.inference import Engine
    from linnet.serve import Service, load_chat_template

    engine = Engine.of_run(
        run,
        slots=slots,
        context_length=context_length,
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype),
        compile=compile_,
        allow_plugins=allow_plugins,
        **({} if name is None else {"name": name}),
    )
    return Service(engine, settings, load_chat_template(run, engine.tokenizer, chat_template))
