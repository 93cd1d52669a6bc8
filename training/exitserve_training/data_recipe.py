"""The keys of a recipe's data and tokenizer. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, ValidationError, model_validator

from exitserve.errors import ExitServeError
from exitserve_training.mistakes import explain
from exitserve_training.strict import Listed, Place, Strict

DocumentEnd = Literal["eos", "none"]
"""What stands between packed documents."""


class TrainBpe(Strict):
    """A byte-level BPE trained on the run's training documents."""

    vocab_size: int = Field(ge=258)
    """Entries, the 256 bytes and two special tokens included."""


class TokenizerRecipe(Strict):
    """Which tokenizer: an existing one, or one trained on the data."""

    path: Place | None = None
    """Directory or hub id."""
    train_bpe: TrainBpe | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizerRecipe:
        if (self.path is None) == (self.train_bpe is None):
            raise ValueError("give exactly one of tokenizer.path and tokenizer.train_bpe")
        return self


class OwnChats(Strict):
    """Train on chats that the model writes itself, questions too, as vLLM serves it."""

    count: int = Field(ge=2)
    """How many to write."""
    system: str | None = None
    """The system prompt of all of them; null: what the chat template does without one."""
    temperature: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Of the answers; null: 0 and 0.7 by turns. That of the questions is 1."""


_ONLY_FOR = {
    **dict.fromkeys(("own_chats", "loss_on", "packing"), ("chat",)),
    **dict.fromkeys(("python_source", "exclude", "order", "document_end", "from_run"), ("text",)),
    **dict.fromkeys(("max_file_bytes", "max_package_bytes", "max_bytes"), ("text",)),
    "max_repeated_lines": ("text",),
    "sequence_length": ("text", "chat", "labelled"),
    "text_field": ("text", "labelled"),
    **dict.fromkeys(("pair_field", "columns"), ("labelled",)),
    **dict.fromkeys(("label_field", "max_rows"), ("labelled", "images")),
    "augment": ("images",),
}
"""Keys of `data` that some formats only can use."""

_WITH_FROM_RUN = {"from_run", "format", "sequence_length"}
"""Keys of `data` that may stand beside `from_run`."""


class DataRecipe(Strict):
    """Where the documents come from and how they are cut; see `docs/recipes.md`."""

    format: Literal["text", "chat", "labelled", "images"] = "text"
    """`chat`: rows with `messages`, or with `prompt` and `completion`; see `loss_on`.
    `labelled`: rows with a text and its class. `images`: folders, one a class, or .npz."""
    loss_on: Literal["completion", "assistant", "all"] = "completion"
    """Of a chat: train on the last answer alone, on all of the assistant's, or on all of it."""
    packing: bool = False
    """Of chats: several share a sequence, each with positions and attention of its own."""
    files: Annotated[list[Place], Listed] = Field(default_factory=list)
    """Text (.txt, .md, .py, ...: one document per file), .jsonl, .json or .parquet; globs."""
    dataset: str | None = None
    """A `datasets` id."""
    dataset_config: str | None = None
    dataset_split: str = Field(
        default="train", validation_alias=AliasChoices("split", "dataset_split")
    )
    """As `datasets` has it: `train`, `train[:10%]`."""
    validation_split: str | None = None
    """A split of `dataset` to hold out, instead of a share of the documents."""
    order: Literal["shuffled", "source"] = "shuffled"
    """`shuffled`: documents are drawn by the seed, equal ones once, all in memory. `source`: as
    they come, from disk or network, with bounded memory; `max_bytes` ends the reading."""
    document_end: DocumentEnd = "eos"
    """`none`: nothing marks where a document ends, as where rows are lines of one text."""
    text_field: str = "text"
    """The column that holds the text, for JSONL, Parquet and `dataset`."""
    pair_field: str | None = None
    """Of `labelled` rows: the column of a second text, where two are classified together."""
    label_field: str = "label"
    """Of `labelled` rows and of images in `dataset`: the column of the class."""
    columns: list[str] | None = None
    """Of `labelled` .tsv and .csv files without a header: the names of their columns."""
    augment: bool = True
    """Of `images`: shift, mirror and turn them a little in training."""
    max_rows: int | None = Field(default=None, ge=1)
    """The most labelled rows or images to train on, drawn by the seed."""
    python_source: list[Literal["stdlib", "site-packages"]] = Field(default_factory=list)
    """Python files of this installation, read in place."""
    from_run: Place | None = None
    """Instead: `output_dir` of an earlier run, whose sequences are read, those held out too."""
    exclude: list[str] = Field(default_factory=list)
    """Glob patterns of `python_source` names (`site-packages/pkg/mod.py`) to leave out."""
    max_file_bytes: int | None = Field(default=None, ge=1)
    """Longer documents are left out."""
    max_package_bytes: int | None = Field(default=None, ge=1)
    """The most bytes of one top-level package of `python_source`."""
    max_bytes: int | None = Field(default=None, ge=1)
    """The most bytes of text in all, drawn by the seed."""
    max_repeated_lines: float | None = Field(default=None, gt=0.0, le=1.0)
    """Leave out what nearly copies: at most this share of a document's lines may have stood in
    earlier documents, of which those held out are the first."""
    validation_files: Annotated[list[Place], Listed] = Field(default_factory=list)
    """Held-out files; without them a share of the documents is held out."""
    validation_fraction: float = Field(default=0.01, gt=0.0, lt=1.0)
    validation_blocks: int = Field(default=128, ge=1)
    """The most sequences to evaluate on."""
    sequence_length: int = Field(default=512, ge=2)
    """Tokens per packed sequence."""
    own_chats: OwnChats | None = None
    """Chats that `model` writes, beside those of `files` and `dataset`, or alone."""

    @model_validator(mode="after")
    def _some_source(self) -> DataRecipe:
        if self.from_run is not None:
            self._check_from_run()
        elif not (self.files or self.dataset or self.python_source or self.own_chats):
            raise ValueError(
                "data needs one of data.files, data.dataset, data.python_source, data.from_run, "
                "data.own_chats"
            )
        self._check_held_out()
        for key in sorted(self.model_fields_set):
            formats = _ONLY_FOR.get(key, ())
            if formats and self.format not in formats and getattr(self, key):
                raise ValueError(
                    f"data.{key} has no effect with data.format={self.format}, only with "
                    f"{' or '.join(formats)}; leave it out, or set data.format"
                )
        return self

    def _check_held_out(self) -> None:
        """Raises `ValueError` for what cannot be held out, or not be left out, as asked."""
        if self.validation_split is not None:
            if self.dataset is None:
                raise ValueError(
                    "data.validation_split names a split of data.dataset; give that, or "
                    "data.validation_files"
                )
            if self.validation_files:
                raise ValueError(
                    "data.validation_split and data.validation_files both say what is held out; "
                    "leave one of them out"
                )
        if self.order == "source" and self.max_repeated_lines is not None:
            raise ValueError(
                "data.max_repeated_lines needs all lines in memory, which data.order=source does "
                "not keep; leave one of them out"
            )

    def _check_from_run(self) -> None:
        """Raises `ValueError` for keys that say again what the earlier run has settled."""
        for key in sorted(self.model_dump(exclude_defaults=True).keys() - _WITH_FROM_RUN):
            raise ValueError(
                f"data.{key} has no effect with data.from_run, which gives sequences as they were "
                f"cut; leave it out, or leave from_run out"
            )

    @property
    def is_classification(self) -> bool:
        """Whether the model is to predict a class, rather than tokens."""
        return self.format in ("labelled", "images")


def data_from(fields: Mapping[str, Any]) -> DataRecipe:
    """A recipe's `data` from its keys; raises `ExitServeError` for bad ones."""
    try:
        return DataRecipe.model_validate(fields)
    except ValidationError as error:
        raise ExitServeError(explain(error, DataRecipe)) from error
