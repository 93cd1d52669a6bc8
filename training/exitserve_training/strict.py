"""The base of all that a recipe can hold. Imports no torch."""

import os.path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict


class Strict(BaseModel):
    """Unknown keys are errors: a misspelt key must not silently train something else."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def _listed(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if value is None or isinstance(value, list) else [value]


Listed = BeforeValidator(_listed)
"""Makes a list of `8,15`, as people write it on a command line, and of a single value."""

Place = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or glob, whose `~` no shell has replaced, or a hub id."""
