"""`linnet corpus score`: nats per byte of every document."""

from pathlib import Path
from typing import Annotated

import typer

from linnet.corpus.cli.stages import Anew, AsJson, Bar, Engine, Out, Sources, TextKey, Workers, connect, run_and_show
from linnet.options import Device, Dtype, options


@options
def score(
    source: Sources,
    *,
    model: list[Path],
    out: Out,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1)] = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    text_key: TextKey = "text",
    engine: Engine = "local",
    workers: Workers = 1,
    anew: Anew = False,
    allow_plugins: Annotated[bool, typer.Option("--allow-plugins/--no-allow-plugins")] = False,
    as_json: AsJson = False,
) -> None:
    """Score every document by nats per letter and byte, with the state carried from its beginning to its end.

    The score is stored as nats_per_byte beside the text. Documents under 64 bytes get none and are counted.

    Example: [bold]linnet corpus score unique --model runs/tnl-10m-1a2b3c4d5e6f --out scored[/]

    Args:
        model (RUN): Run or model folder. Given twice: the first was trained on half 0 of the documents, the second on
            half 1, and each scores the half that it has not read.
        seed: Seed of the halves, if two models are given.
        device: auto is the GPU if there is one.
        dtype: Number format of weights and products.
        allow_plugins: Run the Python files that the folder's config.yaml names as plugins. Only if you trust them.
    """
    from linnet.corpus.scoring.score import score_stage
    from linnet.train import device as devices

    connect(engine, workers)

    def run(bar: Bar) -> dict:
        chosen = str(devices.choose(device))
        options = {"seed": seed, "precision": dtype, "workers": workers, "engine": engine}
        options |= {"text_key": text_key, "anew": anew}
        return score_stage(source, model, out, device=chosen, allow_plugins=allow_plugins, progress=bar, **options)

    run_and_show(run, out, as_json)
