"""The transformers configuration of an exported model; holds Linnet's complete configuration under the key `model`."""

from typing import Any

from transformers import PreTrainedConfig

from linnet.config import parse
from linnet.models import ModelConfig, upgrade


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
