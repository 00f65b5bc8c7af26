"""lm-evaluation-harness's own command with Linnet's models in it (extra `eval`).

    python -P -m linnet.lm_eval --model linnet --model_args pretrained=runs/tnl-10m-0123456789ab --tasks lambada_openai

The harness has no plug-ins, so a command of its own must register the model. Every option of `lm_eval` works, and every
other `--model`. `linnet evaluate tasks` asks the same questions and stores the record beside the run.
"""

import sys
from typing import Any

from linnet.config import ConfigError, nearest, refuse
from linnet.install import install_command

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
except ImportError as error:
    message = (
        f"linnet.lm_eval needs lm-evaluation-harness, which is not installed; install it: {install_command('eval')}"
    )
    raise ImportError(message) from error

import torch

from linnet.evaluate.harness import LinnetLM
from linnet.inference import Engine

ARGUMENTS = ("pretrained", "dtype", "max_length", "allow_plugins", "trust_remote_code")
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
HARNESS_DEVICE = "cuda:0"  # what the harness passes without --device, also where there is no GPU
SLOTS = 8  # prompts that are continued at a time if the harness does not set a batch size


@register_model("linnet")
class HarnessModel(LinnetLM):
    """`--model linnet` of the harness.

    Args:
        pretrained: a run or model folder.
        dtype: of the weights: float32, bfloat16, float64, or auto (bfloat16 on a GPU, float32 on a CPU).
        max_length: tokens of context and answer that the model may see; longer contexts lose their beginning. None is
            all.
        allow_plugins: also import the files of a folder's own mixers that are not trusted; as `--allow-plugins`.
        trust_remote_code: has no effect; `--trust_remote_code` of the harness sets it for every model.
        device, batch_size, max_batch_size: from the harness's options. The batch size is the number of prompts that are
            continued at a time; answers are scored in batches that hold a number of tokens.

    Raises:
        ConfigError: lists all arguments that are wrong, or the folder has no model.
    """

    def __init__(
        self,
        pretrained: str = "",
        dtype: str = "auto",
        max_length: int | None = None,
        allow_plugins: bool = False,
        trust_remote_code: bool = False,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **unknown: Any,
    ):
        problems = [f"{key}: unknown argument (value {unknown[key]!r}); {nearest(key, ARGUMENTS)}" for key in unknown]
        if not pretrained:
            problems.append("pretrained: required, but not given; write --model_args pretrained=RUN")
        if dtype not in DTYPES:
            problems.append(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            problems.append(f"max_length: must be a whole number of at least 1 (given {max_length!r})")
        if type(allow_plugins) is not bool:
            problems.append(f"allow_plugins: must be True or False (given {allow_plugins!r})")
        size = str(batch_size if batch_size is not None else SLOTS).partition(":")[0]  # auto:4 looks again 4 times
        if size != "auto" and (not size.isdecimal() or int(size) < 1):
            problems.append(f"batch_size: must be auto or a whole number of at least 1 (given {batch_size!r})")
        refuse(problems, "--model_args")
        slots = int(size) if size != "auto" else SLOTS if max_batch_size is None else min(SLOTS, max_batch_size)
        absent = device == HARNESS_DEVICE and not torch.cuda.is_available()
        device = "auto" if device is None or absent else device.partition(":")[0]
        engine = Engine.of_run(
            pretrained,
            allow_plugins=allow_plugins,
            device=device,
            dtype=DTYPES[dtype],
            slots=slots,
            context_length=max_length + 1 if max_length else None,
        )
        if engine.tokenizer is None:
            raise ConfigError([f"{pretrained}: has no tokenizer; tasks need one"], "--model_args")
        super().__init__(engine, max_length)

    def get_model_info(self) -> dict[str, Any]:
        """Returns what the harness stores about the model with its results."""
        model = self.engine.model
        return {
            "model_num_parameters": sum(p.numel() for p in model.parameters()),
            "model_dtype": str(model.embedding.weight.dtype),
        }

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Raises ConfigError: special tokens that a text spells out stay text here."""
        fix = "leave the option off, or export the model (linnet convert --to hf) and use --model hf"
        raise ConfigError([f"--apply_chat_template: --model linnet does not apply chat templates; {fix}"], "lm_eval")


def main() -> None:
    """Runs the harness's command with the arguments of this process."""
    sys.argv[0] = "python -m linnet.lm_eval"
    try:
        cli_evaluate()
    except ConfigError as error:
        print(f"error {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
