"""The settings that every rule has: whether it is applied."""

import typing
from collections.abc import Mapping

from pydantic import Field, model_validator

from linnet.config import Config, shown


class Switch(Config):
    """A rule without settings of its own. `false` in a file turns it off, `true` on."""

    enabled: bool = Field(True, description="false leaves the rule out")

    @model_validator(mode="before")
    @classmethod
    def _switched(cls, values: typing.Any) -> typing.Any:
        if isinstance(values, bool):
            return {"enabled": values}
        if not isinstance(values, Mapping | Switch):
            raise ValueError(f"{shown(values)} is not a setting of a rule; write true, false or its settings")
        return values
