"""The transformers configuration of an exported model; holds Linnet's complete configuration under the key `model`.

transformers and programs on top of it do not discover plug-ins, so a saved folder carries a file of a few lines,
`modeling_linnet.py`, which imports Linnet. With `trust_remote_code=True` they run this file and need nothing else.
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from linnet.config import parse
from linnet.models import ModelConfig, upgrade

MODULE = "modeling_linnet"
AUTO_MAP = {"AutoConfig": f"{MODULE}.LinnetConfig", "AutoModelForCausalLM": f"{MODULE}.LinnetForCausalLM"}
# transformers tells people to install what a modelling file imports, unless the import is inside `try`; `pip install
# linnet` would install another project.
CODE = '''"""This model is Linnet's: everything is in the package linnet-lm."""

try:
    from linnet.hf import LinnetConfig, LinnetForCausalLM
except ImportError as error:
    raise ImportError("this model needs Linnet: pip install 'linnet-lm[hf]'") from error

__all__ = ["LinnetConfig", "LinnetForCausalLM"]
'''


class LinnetConfig(PreTrainedConfig):
    """config.json of an exported model.

    Attributes:
        model: the values of a `linnet.models.ModelConfig`, or the name of a recipe; missing values have their defaults.
        use_cache: whether generation keeps states between tokens.
        tie_word_embeddings: follows `model`.

    `vocab_size`, `hidden_size` and `num_hidden_layers` are read from `model`, for programs that use these names.

    Raises:
        ConfigError: `model` is not a valid configuration, or names a mixer from outside the package that was not
            imported before.
    """

    model_type = "linnet"
    keys_to_ignore_at_inference = ["past_key_values"]

    model: dict[str, Any] | str = "tnl-10m"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        values = {"recipe": self.model} if isinstance(self.model, str) else upgrade(self.model)
        self.model = parse(ModelConfig, values, "model of config.json").model_dump(mode="json")
        self.tie_word_embeddings = self.model["tie_embeddings"]
        super().__post_init__(**kwargs)
        self.auto_map = dict(AUTO_MAP)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Writes config.json, and the modelling file that its `auto_map` names, for `trust_remote_code=True`."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{MODULE}.py").write_text(CODE, encoding="utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: transformers would copy this module into the folders that it saves; `CODE` stands there."""

    def linnet(self) -> ModelConfig:
        """Returns the configuration from which Linnet builds the model."""
        return parse(ModelConfig, self.model, "model of config.json")

    @property
    def vocab_size(self) -> int:
        return self.model["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, rows: int) -> None:  # transformers sets it when it resizes the embeddings
        self.model = {**self.model, "vocab_size": int(rows)}

    @property
    def hidden_size(self) -> int:
        return self.model["d_model"]

    @property
    def num_hidden_layers(self) -> int:
        return self.linnet().num_layers
