"""The base of all that a recipe can hold. Imports no torch."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown keys are errors: a misspelt key must not silently train something else."""

    model_config = ConfigDict(extra="forbid")
