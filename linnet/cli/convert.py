"""`linnet convert`: checkpoints of other projects to Linnet, and Linnet's models to transformers."""

from pathlib import Path
from typing import Literal

import typer

from linnet.companions import Offer
from linnet.config import printable
from linnet.options import AllowPlugins, options, working

Own = Literal["hf", "llama", "vit", "timm", "linnet", "qwen2", "qwen3"]
Hybrid = Literal["bamba", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_next"]
Sparse = Literal["bailing_hybrid", "jamba", "kimi_linear", "minimax"]
Uniform = Literal["delta_net", "gated_deltanet", "kda", "mamba", "mamba2", "rwkv7", "rwkv7_author"]
Target = Literal[Own, Hybrid, Sparse, Uniform]


@options
def convert(
    path: Path,
    *,
    to: Target | None = None,
    out: Path | None = None,
    mixer: list[str] | None = None,
    shard_size: str | None = None,
    allow_pickle: bool = False,
    allow_plugins: AllowPlugins = False,
) -> None:
    """Turn a run into a folder that transformers loads, or a checkpoint of another project into a Linnet model.

    Checkpoints: Llama, Mistral, Qwen2, Qwen3, Qwen3.5, Qwen3-Next, Olmo-Hybrid,
    LFM2, Granite 4, Bamba, Falcon-H1, Nemotron-H, Kimi Linear, Ling 3, Jamba,
    MiniMax-01, Mamba and Mamba-2 of transformers; HGRN, HGRN2, GLA, LightNet,
    Gated DeltaNet, DeltaNet, KDA, RWKV-7, Transformer, Mamba and Mamba-2 of
    flash-linear-attention; Mamba-2 of state-spaces; RWKV-7 of its author;
    TransNormerLLM; ViT and DeiT of transformers and timm. Settings that Linnet's
    layers cannot express are errors.

    [bold]linnet convert runs/tnl-0123456789ab --to hf[/], then AutoModelForCausalLM with trust_remote_code=True.

    [bold]linnet convert runs/llama-0123456789ab --to llama[/]: a model of attention+swiglu as a plain Llama

    [bold]linnet convert RUN --to qwen3_5[/]: in the layout of another project, if it has these layers

    [bold]linnet convert runs/deit-0123456789ab --to timm[/]: an image classifier of attention+mlp as a ViT

    [bold]linnet convert mine-hf --mixer my_mixer.py:MyMixer[/]: back from transformers' format

    [bold]linnet convert TransNormerLLM-385M[/], then [bold]linnet generate TransNormerLLM-385M-linnet "Once"[/]

    Args:
        path: A run, a model folder, or a checkpoint folder with config.json.
        to: Default: hf from a run or model folder (vit from one with an image classifier), linnet from a checkpoint.
        out: A new folder. Default: PATH's name with - and the target appended, in this folder.
        mixer (FILE.py:CLASS): The file of a mixer of your own in a checkpoint that Linnet exported; may be given again.
        shard_size: Largest file of weights that an export writes, such as 200MB. Default: 5GB.
        allow_pickle: Also read pytorch_model.bin; only if you trust its source.
    """
    from rich.console import Console

    from linnet.config import ConfigError, refuse

    if not path.is_dir():
        fix = "name one with config.yaml (a run) or config.json (a checkpoint)"
        raise ConfigError([f"{path}: is not a folder; {fix}"], "convert")
    ours = (path / "config.yaml").is_file()
    if not ours and not (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        message = f"{path}: has neither config.yaml (a run) nor config.json (a checkpoint); name a folder with one"
        raise ConfigError([message], "convert")
    classifies = ours and _classifies(path)
    target = to or ("linnet" if not ours else "vit" if classifies else "hf")
    if ours == (target == "linnet"):
        has = (
            f"{path} has Linnet's layout already, which every command reads; to share it without its history, use --to "
        )
        only = f"{path} is a checkpoint of another project; convert it to linnet first, then the result to {target}"
        raise ConfigError([f"--to {target}: {has + ('vit' if classifies else 'hf') if ours else only}"], "convert")
    if classifies and target not in ("vit", "timm", "linnet"):
        message = f"--to {target}: {path} contains an image classifier; use --to vit or --to timm"
        raise ConfigError([message], "convert")
    if shard_size is not None and target in ("linnet", "vit", "timm"):
        message = f"--shard-size {shard_size}: has no effect on --to {target}, which writes one file; leave it out"
        raise ConfigError([message], "convert")
    if ours:
        fix = f"leave it out: the config.yaml of {path} names the files of its mixers"
        unused = [f"--mixer {mixer[0]}: has no effect on --to {target}; {fix}"] if mixer else []
        fix = "leave it out: weights of a run or model folder are safetensors"
        unused += [f"--allow-pickle: has no effect on --to {target}; {fix}"] if allow_pickle else []
    else:
        fix = "leave it out: only the config.yaml of a run or model folder names Python files; give those with --mixer"
        unused = [f"--allow-plugins: has no effect on {path}, a checkpoint; {fix}"] if allow_plugins else []
    refuse(unused, "convert")
    out = out or Path(f"{path.resolve().name}-{target}")
    writers = Offer("exports")
    if ours and target in ("vit", "timm") and target not in writers:
        raise ConfigError([f"--to {target}: needs the package linnet.vision, which is not installed"], "convert")
    try:
        from linnet import hf
    except ImportError as error:
        raise ConfigError([str(error)], "convert") from None
    if ours:
        sized = {"allow_plugins": allow_plugins, "shard_size": shard_size or "5GB"}
        with working("writing the folder"):
            if target in writers:
                written = writers[target](path, out, allow_plugins=allow_plugins)
            else:
                written = hf.export(path, out, **sized) if target == "hf" else hf.export_as(target, path, out, **sized)
        typer.echo(written)
        return
    console = Console(stderr=True, soft_wrap=True)
    with working("reading the weights", console):
        converted = hf.convert(path, out, allow_pickle, mixer or [])
    about = f"{converted.layout}: {converted.model.layout}, width {converted.model.d_model}"
    for line in (about, *(f"note: {note}" for note in converted.notes)):
        console.print(printable(line), highlight=False, markup=False)
    typer.echo(converted.path)


def _classifies(path: Path) -> bool:
    """Returns whether a folder contains an image classifier."""
    from linnet.runs import RunFolder
    from linnet.runs.model import read_kind

    return read_kind(RunFolder.open(path)).name == "classifier"
