"""Linnet's models as transformers models, and other people's checkpoints as Linnet's (the extra `hf`).

import linnet.hf                                                # registers the classes below with transformers
model = AutoModelForCausalLM.from_pretrained("folder")          # a folder of `linnet convert RUN --to hf`
"""

try:
    import transformers
except ImportError as error:
    raise ImportError("linnet.hf stands on transformers, which is not installed: pip install 'linnet[hf]'") from error

from linnet.hf.cache import LinnetCache
from linnet.hf.config import LinnetConfig
from linnet.hf.convert import Converted, convert
from linnet.hf.export import export
from linnet.hf.model import LinnetForCausalLM
from linnet.hf.tokenizer import to_transformers

transformers.AutoConfig.register("linnet", LinnetConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(LinnetConfig, LinnetForCausalLM, exist_ok=True)

__all__ = [
    "Converted",
    "LinnetCache",
    "LinnetConfig",
    "LinnetForCausalLM",
    "convert",
    "export",
    "to_transformers",
]
