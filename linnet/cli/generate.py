"""`linnet generate`: text from a trained run."""

from pathlib import Path
from typing import Annotated

import typer

from linnet.cli.allow import ALLOW_PLUGINS


def generate(
    run: Annotated[Path, typer.Argument(help="A run folder, as [bold]linnet train[/] prints it.", show_default=False)],
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue; - reads it from the standard input.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file (UTF-8), however long.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Upper bound of generated tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many of the most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the smallest set of tokens with this total probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Draw from tokens with at least this share of the highest probability.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens seen before become less likely.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the completion; may be given again.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws; the same seed gives the same text.")] = None,
    samples: Annotated[int, typer.Option(help="Completions of the same prompt, with consecutive seeds.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, also of this many most likely tokens.")
    ] = None,
    from_state: Annotated[
        Path | None, typer.Option(help="Continue from a state that --save-state wrote.", show_default=False)
    ] = None,
    save_state: Annotated[
        Path | None,
        typer.Option(help="Save the state after the prompt (a file of constant size) and stop.", show_default=False),
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Capacity of KV caches, for layers that have one.", show_default="4096")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (the GPU if there is one), cpu or cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16.", show_default="bfloat16 on a GPU, else float32")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the step first; pays off from thousands of tokens on a CPU.")
    ] = False,
    allow_plugins: Annotated[bool, typer.Option("--allow-plugins", help=ALLOW_PLUGINS)] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print a list of completions as JSON.")] = False,
) -> None:
    """Generate text with a trained model.

    The text is printed as it is generated. Memory does not grow with its length,
    except for models with full attention, whose cache --context-length bounds.

    [bold]linnet generate runs/tnl-10m-0123456789ab "def main("[/]
    [bold]linnet generate RUN "Once" --temperature 0.8 --top-p 0.95 --seed 1[/]
    [bold]linnet generate RUN --prompt-file book.txt --save-state book.state[/]
    [bold]linnet generate RUN "And then" --from-state book.state[/]
    """
    import json

    from linnet import trust
    from linnet.config import ConfigError, gather, parse, unwritable
    from linnet.runs import RunFolder

    values = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or [],
        "seed": seed,
        "logprobs": logprobs,
    }
    problems, text = [], ""
    with gather(problems):
        folder = RunFolder.open(run)
        trust.check_plugins(folder.config, folder.path / "config.yaml", allow_plugins)
    with gather(problems):
        text = _read_prompt(prompt, prompt_file, from_state is not None)
    if from_state is not None and not from_state.is_file():
        problems.append(f"--from-state {from_state}: not found; --save-state writes such a file")
    if save_state is not None and (save_state.is_dir() or not save_state.absolute().parent.is_dir()):
        problems.append(
            f"--save-state {save_state}: is a folder or lies in none that exists; name a file in an existing folder"
        )
    elif save_state is not None and (reason := unwritable(save_state.absolute().parent)):
        problems.append(f"--save-state {save_state}: {reason}; name another file")
    if logprobs is not None and not json_:
        problems.append(f"--logprobs {logprobs}: needs --json; add it")
    if samples < 1:
        problems.append(f"--samples: {samples} is below 1; give 1 or more")
    if dtype not in (None, "float32", "bfloat16"):
        problems.append(f"--dtype: {dtype!r} is unknown; use float32 or bfloat16")
    from linnet.inference.sampling import Sampling

    try:
        sampling = parse(Sampling, values)
    except ConfigError as error:
        problems += [
            "--" + problem.replace("_", "-", problem.partition(":")[0].count("_")) for problem in error.problems
        ]
    if problems:
        raise ConfigError(problems, "command line")

    import torch

    from linnet.inference import Engine

    engine = Engine.of_run(
        run,
        slots=min(samples, 8),
        context_length=context_length,
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype),
        compile=compile,
        allow_plugins=allow_plugins,
    )
    prefix = None if from_state is None else engine.load_prefix(from_state)
    if save_state is not None:
        found = engine.prefix(text, prefix)
        found.save(save_state)
        typer.echo(f"{found.tokens} tokens in {save_state} ({save_state.stat().st_size:,} bytes)", err=True)
        return
    if samples == 1 and not json_:
        for piece in engine.stream(text, sampling, prefix):
            typer.echo(piece.text, nl=False)
        typer.echo()
        return
    first = engine.check(text, sampling, prefix).seed
    settings = [sampling.model_copy(update={"seed": (first + i) % (1 << 63)}) for i in range(samples)]
    completions = engine.generate([text] * samples, settings, prefix)
    if json_:
        typer.echo(json.dumps([_plain(completion) for completion in completions], indent=1, ensure_ascii=False))
    else:
        for number, completion in enumerate(completions, 1):
            typer.echo(f"--- {number}, seed {completion.request.seed}\n{completion.text}")


def _read_prompt(prompt: str | None, file: Path | None, may_be_empty: bool) -> str:
    import sys

    from linnet.config import ConfigError

    if prompt is not None and file is not None:
        raise ConfigError(["PROMPT, --prompt-file: both are given; drop one"])
    if prompt is None and file is None:
        if may_be_empty:
            return ""
        raise ConfigError(["PROMPT: is missing; give a text, - for the standard input, or --prompt-file"])
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return sys.stdin.buffer.read().decode() if prompt == "-" else prompt
    except OSError as error:
        raise ConfigError([f"--prompt-file {file}: cannot be read ({error.strerror})"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"PROMPT: not UTF-8 (byte {error.start}); convert it to UTF-8"]) from None


def _plain(completion) -> dict:
    plain = {
        "text": completion.text,
        "finish": completion.finish,
        "seed": completion.request.seed,
        "prompt_tokens": completion.request.prompt_tokens,
        "tokens": completion.tokens,
    }
    if completion.logprobs:
        plain["logprobs"] = completion.logprobs
        plain["top_logprobs"] = [[list(pair) for pair in top] for top in completion.top_logprobs]
    return plain
