"""Finds the files of the full checkpoint: a directory, or a hub id that is fetched."""

from __future__ import annotations

from pathlib import Path

from exitserve.errors import ExitServeError
from exitserve.truncation.card import CARD, COPIED_FILES


def local_checkpoint(model: str) -> Path:
    """The directory of a checkpoint; for a hub model, in the local hub cache.

    Args:
        model: a directory, or a hub id that `read_config` found.

    Raises:
        ExitServeError: the files cannot be fetched.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    patterns = [
        "config.json",
        CARD,
        *COPIED_FILES,
        "model*.safetensors",
        "*.safetensors.index.json",
    ]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # errors of the hub are subclasses
        raise ExitServeError(
            f"the files of '{model}' could not be fetched ({type(error).__name__}); "
            f"download the checkpoint and give its directory."
        ) from error
