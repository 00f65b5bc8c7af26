"""`linnet generate`: text from a trained run."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import typer

from linnet.config import ConfigError, gather, refuse, unwritable
from linnet.options import AllowPlugins, echo_json, options, parse_options, values_of, working

MOST_SAMPLES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How tokens are chosen and when a completion ends: keys of `linnet.inference.Sampling`, which checks them.

    Attributes:
        max_tokens: Upper bound of generated tokens (default: 256, or as many as the context still holds).
        temperature: 0 always takes the most likely token.
        top_k: Draw from this many of the most likely tokens; 0: from all.
        top_p: Draw from the smallest set of tokens with this total probability.
        min_p: Draw from tokens with at least this share of the highest probability.
        repetition_penalty: Above 1: tokens seen before become less likely.
        stop: Text that ends the completion; may be given again.
        seed: Seed of the draws; the same seed gives the same text.
        logprobs: With --json: log-probabilities, also of this many most likely tokens.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    seed: int | None = None
    logprobs: int | None = None


@options
def generate(
    run: Path,
    prompt: str | None = None,
    *,
    prompt_file: Path | None = None,
    chat: bool = False,
    decoding: Decoding,
    samples: int = 1,
    from_state: Path | None = None,
    save_state: Path | None = None,
    context_length: int | None = None,
    device: str = "auto",
    dtype: str | None = None,
    compile: bool = False,
    allow_plugins: AllowPlugins = False,
    json_: bool = False,
) -> None:
    """Generate text with a trained model.

    The text is printed as it is generated. Memory does not grow with its length,
    except for models with full attention, whose cache --context-length bounds.

    [bold]linnet generate runs/tnl-10m-0123456789ab "def main("[/]
    [bold]linnet generate RUN "Once" --temperature 0.8 --top-p 0.95 --seed 1[/]
    [bold]linnet generate RUN --prompt-file book.txt --save-state book.state[/]
    [bold]linnet generate RUN "And then" --from-state book.state[/]
    [bold]linnet generate RUN "What is 3 plus 4?" --chat[/]

    Args:
        run: A run folder, as [bold]linnet train[/] prints it, or a model folder.
        prompt: Text to continue; - reads it from the standard input.
        prompt_file: Read the prompt from a file (UTF-8), however long.
        chat: The prompt is a user's turn, in the chat template of the folder; its answer is generated.
        samples: Completions of the same prompt, with consecutive seeds.
        from_state: Continue from a state that --save-state wrote.
        save_state: Save the state after the prompt (a file of constant size) and stop.
        context_length: Capacity of KV caches, for layers that have one (default: 4096).
        device: auto (the GPU if there is one), cpu or cuda.
        dtype: float32 or bfloat16 (default: bfloat16 on a GPU, else float32).
        compile: Compile the step first; pays off from thousands of tokens on a CPU.
        json_: Print a list of completions as JSON.
    """
    from linnet import trust
    from linnet.data.chat.template import FILE, load_chat_template, special_tokens
    from linnet.runs import RunFolder
    from linnet.runs.model import TEXT, read_config, read_tokenizer

    problems, text = [], ""
    with gather(problems):
        folder = RunFolder.open(run)
        trust.check_plugins(folder.config, folder.path / "config.yaml", allow_plugins)
    with gather(problems):
        text = _read_prompt(prompt, prompt_file, from_state is not None)
    if from_state is not None and not from_state.is_file():
        problems.append(f"--from-state {from_state}: not found; --save-state writes such a file")
    if save_state is not None and (save_state.is_dir() or not save_state.absolute().parent.is_dir()):
        what = f"--save-state {save_state}: is a folder or lies in none that exists"
        problems.append(f"{what}; name a file in an existing folder")
    elif save_state is not None and (reason := unwritable(save_state.absolute().parent)):
        problems.append(f"--save-state {save_state}: {reason}; name another file")
    if chat and from_state is not None:
        problems.append(f"--chat: begins a conversation, and --from-state {from_state} continues a text; drop one")
    if decoding.logprobs is not None and not json_:
        problems.append(f"--logprobs {decoding.logprobs}: needs --json; add it")
    if not 1 <= samples <= MOST_SAMPLES:
        problems.append(f"--samples: {samples} is not between 1 and {MOST_SAMPLES:,}; give one of these")
    if dtype not in (None, "float32", "bfloat16"):
        problems.append(f"--dtype: {dtype!r} is unknown; use float32 or bfloat16")
    from linnet.inference.sampling import Sampling

    with gather(problems):
        sampling = parse_options(Sampling, values_of(decoding))
    refuse(problems, "command line")
    tokenizer, turn = read_tokenizer(folder), text
    if tokenizer is None:
        read_config(folder, allow_plugins, TEXT)  # models of other kinds, such as those of images, have none
        fix = "put one into the folder, or send token ids to linnet serve"
        raise ConfigError([f"{run}: has no tokenizer.json, which a prompt of text needs; {fix}"], "command line")
    if chat:
        template = load_chat_template(folder.path, tokenizer)
        if template is None:
            fix = "put one into the folder, or leave the option out"
            raise ConfigError([f"--chat: {folder.path} has no {FILE}; {fix}"], "command line")
        turn = template.encode([{"role": "user", "content": text}])
        sampling = sampling.model_copy(update={"stop_tokens": [*sampling.stop_tokens, *template.turn_ends]})
    elif spelled := [
        token
        for token, number in special_tokens(tokenizer).items()
        if token in text and number not in tokenizer.encode(token)
    ]:
        message = f"the prompt spells the special token {spelled[0]!r}, which is read as text and not as the token"
        typer.echo(f"note: {message}; for a turn of a conversation give its text alone, with --chat", err=True)

    import torch

    from linnet.inference import Engine

    with working("reading the model"):
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
        with working("reading the prompt") as show:
            state = engine.prefix(turn, prefix, lambda read, of: show(f"{read:,} of {of:,} tokens"))
        state.save(save_state)
        typer.echo(f"{state.tokens} tokens in {save_state} ({save_state.stat().st_size:,} bytes)", err=True)
        return
    if samples == 1 and not json_:
        pieces = engine.stream(turn, sampling, prefix)
        with working("reading the prompt"):
            first_piece = next(pieces)
        for piece in itertools.chain([first_piece], pieces):
            typer.echo(piece.text, nl=False)
        typer.echo()
        return
    first = engine.check(turn, sampling, prefix).seed
    settings = [sampling.model_copy(update={"seed": (first + i) % (1 << 63)}) for i in range(samples)]
    with working("generating"):
        completions = engine.generate([turn] * samples, settings, prefix)
    if json_:
        echo_json([_plain(completion) for completion in completions], ensure_ascii=False)
    else:
        for number, completion in enumerate(completions, 1):
            typer.echo(f"--- {number}, seed {completion.request.seed}\n{completion.text}")


def _read_prompt(prompt: str | None, file: Path | None, may_be_empty: bool) -> str:
    import sys

    from linnet.data.records import BadRow, decode_text, read_text

    if prompt is not None and file is not None:
        raise ConfigError(["PROMPT, --prompt-file: both are given; drop one"])
    if prompt is None and file is None:
        if may_be_empty:
            return ""
        raise ConfigError(["PROMPT: is missing; give a text, - for the standard input, or --prompt-file"])
    if prompt == "-" and sys.stdin is None:
        raise ConfigError(["PROMPT: - reads the standard input, which is closed; give a text, or --prompt-file"])
    try:
        if file is not None:
            return read_text(file)
        return decode_text(sys.stdin.buffer.read()) if prompt == "-" else prompt
    except OSError as error:
        raise ConfigError([f"--prompt-file {file}: cannot be read ({error.strerror})"]) from None
    except BadRow as error:
        raise ConfigError([f"{'PROMPT' if file is None else f'--prompt-file {file}'}: {error}"]) from None


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
