"""Models of a hub: single files, or all that a checkpoint needs, at a revision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exitserve.checkpoint.calibration import ROWS_FOLDER
from exitserve.errors import ExitServeError

CARD = "README.md"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""PEFT's files."""
BLOCK_FILE = "multi_exit.json"
"""Holds the exits of an adapter. Beside a config.json transformers would take the folder for a
whole model, and no longer look for its base."""
BESIDE_WEIGHTS = (
    f"{ROWS_FOLDER}/*.safetensors",
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

    Raises:
        ExitServeError: the files cannot be fetched.
    """
    if Path(model).is_dir():
        return Path(model)
    patterns = [
        "config.json",
        CARD,
        *BESIDE_WEIGHTS,
        "model*.safetensors",
        "*.safetensors.index.json",
    ]
    _check_hub_id(model)
    return _snapshot(model, patterns, revision)


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter, and no whole model."""
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file()


def local_adapter(adapter: str) -> Path:
    """The directory of an adapter; for one of a hub, in the local hub cache.

    Raises:
        ExitServeError: there is none, it is not whole, or it cannot be fetched.
    """
    directory = Path(adapter)
    if not directory.is_dir():
        _check_hub_id(adapter, "adapter")
        patterns = [ADAPTER_CONFIG, ADAPTER_WEIGHTS, BLOCK_FILE, *BESIDE_WEIGHTS]
        directory = _snapshot(adapter, patterns)
    if not (directory / ADAPTER_CONFIG).is_file():
        inside = is_adapter(directory / "adapter")
        fix = f"give '{directory / 'adapter'}'" if inside else "give a folder of PEFT's format"
        raise ExitServeError(
            f"'{adapter}' has no {ADAPTER_CONFIG}, so it is not an adapter; {fix}."
        )
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise ExitServeError(
            f"'{adapter}' has no {ADAPTER_WEIGHTS}; save it again by PEFT's save_pretrained, which "
            f"writes safetensors."
        )
    return directory


def _snapshot(model: str, patterns: list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # errors of the hub are subclasses
        at = "" if revision is None else f" at revision {revision!r}"
        raise ExitServeError(
            f"the files of '{model}'{at} could not be fetched ({type(error).__name__}); "
            f"download them and give the directory."
        ) from error


def files_beside_weights(directory: Path) -> Iterator[Path]:
    """Paths of a checkpoint's files that are no weights, relative to it: those to copy."""
    for pattern in BESIDE_WEIGHTS:
        for path in sorted(directory.glob(pattern)):
            if path.is_file():
                yield path.relative_to(directory)


def _check_hub_id(model: str, kind: str = "model") -> None:
    owner, _, name = model.partition("/")
    # A hub id is "owner/name"; a mistyped path must not wait for the network.
    if not owner or not name or "/" in name or Path(owner).is_dir():
        raise ExitServeError(
            f"no {kind} directory at '{model}'; give a Hugging Face checkpoint directory or hub id."
        )
