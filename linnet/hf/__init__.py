"""Exports Linnet's models to transformers, and converts checkpoints of other projects to Linnet (the extra `hf`).

import linnet.hf                                         # registers the classes below with transformers
model = AutoModelForCausalLM.from_pretrained("folder")   # of `linnet convert RUN --to hf`

Without the import, `trust_remote_code=True` runs the folder's modelling file, which imports this package.
"""

from functools import partial

from linnet.deprecation import renamed

try:
    import transformers
except ImportError as error:
    from linnet.install import install_command

    message = f"linnet.hf needs transformers, which is not installed; install it: {install_command('hf')}"
    raise ImportError(message) from error

from linnet.hf.convert import Converted, convert
from linnet.hf.export import export, export_as, export_llama
from linnet.hf.model import LinnetCache, LinnetConfig, LinnetForCausalLM, LinnetTokenizer, to_transformers

transformers.AutoConfig.register("linnet", LinnetConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(LinnetConfig, LinnetForCausalLM, exist_ok=True)
transformers.AutoTokenizer.register(LinnetConfig, tokenizer_class=LinnetTokenizer, exist_ok=True)

__getattr__ = partial(renamed, __name__)

__all__ = [
    "Converted",
    "LinnetCache",
    "LinnetConfig",
    "LinnetForCausalLM",
    "LinnetTokenizer",
    "convert",
    "export",
    "export_as",
    "export_llama",
    "to_transformers",
]
