"""Models of a hub: single files, or all that a checkpoint needs, at a revision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exitserve.calibration_record import SCREENS_FOLDER
from exitserve.errors import ExitServeError

CARD = "README.md"
BESIDE_WEIGHTS = (
    f"{SCREENS_FOLDER}/*.safetensors",
    "draft_head/*.safetensors",
    "added_tokens.json",
    "additional_chat_templates/*.jinja",
    "chat_template.jinja",
    "chat_template.json",
    "chat_templates/*.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model*",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Files of a checkpoint that apply to its first layers too."""


def hub_file(model: str, name: str, revision: str | None = None) -> Path:
    """Path of a hub model's file in the local hub cache, fetched if need be.

    Args:
        model: a hub id, "owner/name".
        name: the file, relative to the model.
        revision: a branch, tag or commit; None for the default branch.

    Raises:
        ExitServeError: `model` is no hub id, or it has no such file or revision.
    """
    _check_hub_id(model)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except (HFValidationError, OSError, ValueError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise ExitServeError(
            f"no {name} of '{model}'{at}: it is neither a directory nor a hub id of which that "
            f"file can be fetched ({type(error).__name__}); give a Hugging Face checkpoint "
            f"directory, or a hub id and revision that exist."
        ) from error


def local_checkpoint(model: str, revision: str | None = None) -> Path:
    """The directory of a checkpoint; for a hub model, in the local hub cache.

    All of its files are of one commit, whatever happens to a branch meanwhile.

    Args:
        model: a directory, or a hub id.
        revision: of a hub id: a branch, tag or commit; None for the default branch.

    Raises:
        ExitServeError: the files cannot be fetched.
    """
    if Path(model).is_dir():
        return Path(model)
    _check_hub_id(model)
    from huggingface_hub import snapshot_download

    patterns = [
        "config.json",
        CARD,
        *BESIDE_WEIGHTS,
        "model*.safetensors",
        "*.safetensors.index.json",
    ]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # errors of the hub are subclasses
        at = "" if revision is None else f" at revision {revision!r}"
        raise ExitServeError(
            f"the files of '{model}'{at} could not be fetched ({type(error).__name__}); "
            f"download the checkpoint and give its directory."
        ) from error


def files_beside_weights(directory: Path) -> Iterator[Path]:
    """Paths of a checkpoint's files that are no weights, relative to it: those to copy."""
    for pattern in BESIDE_WEIGHTS:
        for path in sorted(directory.glob(pattern)):
            if path.is_file():
                yield path.relative_to(directory)


def _check_hub_id(model: str) -> None:
    owner, _, name = model.partition("/")
    # A hub id is "owner/name"; a mistyped path must not wait for the network.
    if not owner or not name or "/" in name or Path(owner).is_dir():
        raise ExitServeError(
            f"no model directory at '{model}'; give a Hugging Face checkpoint directory or hub id."
        )
