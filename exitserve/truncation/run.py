"""Writes the first layers of a checkpoint as a checkpoint of their own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exitserve.checkpoint.block import num_layers_of, parse_multi_exit
from exitserve.checkpoint.exit_rows import load_exit_rows
from exitserve.checkpoint.files import copy_files, new_folder
from exitserve.checkpoint.first_layers import cut_config
from exitserve.checkpoint.hub import CARD, files_beside_weights
from exitserve.checkpoint.weights import write_weights
from exitserve.errors import ExitServeError
from exitserve.truncation.card import model_card
from exitserve.truncation.job import TruncationJob, check_names
from exitserve.truncation.perplexity import Perplexity, measure_perplexity, read_windows


def truncate(
    job: TruncationJob, advance: Callable[[int], Any] = lambda _: None
) -> Perplexity | None:
    """Writes the checkpoint, or, where anything fails, nothing.

    Returns:
        Its perplexity, if that was asked for.

    Raises:
        ExitServeError: the destination exists or cannot be written, the data cannot be read, or
            the perplexity cannot be measured.
    """
    kept = job.weights.first(job.num_layers)
    check_names(kept, job.num_layers)
    block = parse_multi_exit(cut_config(job.config, job.num_layers))
    if block is not None and block.rows_file is not None:
        load_exit_rows(job.directory, block.rows_file)
    if job.data and job.config.get("quantization_config"):
        raise ExitServeError(
            "the perplexity of quantised weights is not measured, since transformers computes "
            "with them differently from vLLM; leave out --data."
        )
    windows = read_windows(job.directory, job.data) if job.data else None
    with new_folder(job.out) as partial:
        write_weights(kept, partial, advance)
        _write_config(job, partial)
        copy_files(job.directory, partial, files_beside_weights(job.directory))
        found = None if windows is None else measure_perplexity(partial, windows, job.data)
        model_card(job, found).save(partial / CARD)
    return found


def _write_config(job: TruncationJob, directory: Path) -> None:
    if job.num_layers == num_layers_of(job.config):
        shutil.copyfile(job.directory / "config.json", directory / "config.json")
        return
    text = json.dumps(cut_config(job.config, job.num_layers), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
