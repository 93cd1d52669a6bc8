"""Chats: rows of messages, rendered by the tokenizer's chat template, with loss on the answers.

TRL's `SFTTrainer` takes the rows with `labels`, as prepared here, so that a row that cannot be
trained on is reported by its name before a run writes anything.
"""

import glob
import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

from exitserve.errors import ExitServeError
from exitserve.reporting.progress import counted
from exitserve_training.chat_rows import Chat, Message, read_chats
from exitserve_training.data_recipe import DataRecipe
from exitserve_training.losses.tokens import IGNORED
from exitserve_training.recipe import Recipe
from exitserve_training.tokenization import padding_id, special_ids
from exitserve_training.trainer import MultiExitTraining


class ChatTrainer(MultiExitTraining, SFTTrainer):
    """TRL's trainer, which pads and batches chats, with multi-exit losses."""

    def create_model_card(self, *_args: Any, **_kwargs: Any) -> None:
        """None: the run has its own report."""

    def _send_telemetry(self) -> None:
        """None: a training run uses the network for its model and data only."""


def load_chats(
    recipe: DataRecipe, tokenizer: PreTrainedTokenizerBase, seed: int, own: Path | None = None
) -> datasets.DatasetDict:
    """Reads chats, those that the model has written too, and holds some out; columns `input_ids`
    and `labels`, unpadded.

    Rows have `messages` (a list of {role, content}) or `prompt` and `completion` (text, or lists
    of messages). With `loss_on: completion` only the last answer has labels. Chats are cut to
    `sequence_length`; those of which nothing is left to learn are left out, and counted on the
    terminal.

    Raises:
        ExitServeError: a row is not a chat, or nothing is left.
    """
    files = recipe.files if own is None else [*recipe.files, glob.escape(str(own))]
    rows = _encoded(read_chats(recipe, files, recipe.dataset_split), tokenizer, recipe)
    random.Random(seed).shuffle(rows)
    if recipe.validation_files or recipe.validation_split is not None:
        chats = read_chats(recipe, recipe.validation_files, recipe.validation_split)
        held_out = _encoded(chats, tokenizer, recipe)
        known = {tuple(row["input_ids"]) for row in held_out}
        rows = [row for row in rows if tuple(row["input_ids"]) not in known]
    else:
        count = max(1, round(len(rows) * recipe.validation_fraction))
        held_out, rows = rows[:count], rows[count:]
    print(f"Held out: {len(held_out):,} of {len(held_out) + len(rows):,} chats.")
    if not rows:
        raise ExitServeError(
            "no chat is left to train on, because one at least is held out; give more chats, a "
            "lower data.validation_fraction, or data.validation_files."
        )
    sides = datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows),
        validation=datasets.Dataset.from_list(held_out[: recipe.validation_blocks]),
    )
    return packed_chats(sides, recipe.sequence_length) if recipe.packing else sides


def packed_chats(sides: datasets.DatasetDict, length: int) -> datasets.DatasetDict:
    """Sequences of whole chats, filled best fit first, with the `position_ids` of each chat.

    The first token of a chat has no label: the end of another one stands before it.
    """
    alone = sides.map(
        lambda row: {
            "labels": [IGNORED, *row["labels"][1:]],
            "position_ids": list(range(len(row["input_ids"]))),
        }
    )
    filled: datasets.DatasetDict = pack_dataset(alone, length, "bfd")
    return filled.remove_columns("seq_lengths")


def write_held_out(file: Path, rows: datasets.Dataset, tokenizer: Any) -> None:
    """Writes the chats of packed or single sequences as rows of `text`, as the model reads them.

    That is what `exitserve calibrate` and `eval` take. A beginning of text that the tokenizer puts
    before every text is left to it.
    """
    first = [tokenizer.bos_token_id]
    is_added = tokenizer("a")["input_ids"][:1] == first
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            ids = row["input_ids"]
            starts = [at for at, p in enumerate(row.get("position_ids", [0])) if p == 0]
            for start, end in pairwise([*starts, len(ids)]):
                start += is_added and ids[start : start + 1] == first
                text = tokenizer.decode(ids[start:end])
                out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class PackedChats:
    """Pads packed sequences to the longest of a batch.

    No attention mask goes to the model, which tells chats apart by positions that begin anew;
    `attention_mask` is for the losses. Padding is a chat of its own behind all others.
    """

    pad_id: int
    multiple_of: int = 1

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
        """Columns [B, T] of rows as `packed_chats` makes them."""
        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.multiple_of) * self.multiple_of
        fill = {"input_ids": self.pad_id, "labels": IGNORED}
        columns: dict[str, list[list[int]]] = defaultdict(list)
        for row in rows:
            empty = width - len(row["input_ids"])
            columns["position_ids"].append([*row["position_ids"], *range(empty)])
            columns["attention_mask"].append([1] * (width - empty) + [0] * empty)
            for name, value in fill.items():
                columns[name].append([*row[name], *[value] * empty])
        return {name: torch.tensor(values) for name, values in columns.items()}


def chat_collator(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Makes batches of chats; TRL's own, but for packed ones.

    TRL would make one by itself, and write the padding token that it chose into the tokenizer and
    the model's config: a checkpoint would come back with another tokenizer than it had.
    """
    pad_id, multiple = padding_id(tokenizer), recipe.training.get("pad_to_multiple_of")
    if recipe.data.packing:
        # Compiled code is best, and made once, for batches that are all of one shape.
        return PackedChats(
            pad_id, recipe.data.sequence_length if recipe.compile_layers else multiple or 1
        )
    return DataCollatorForLanguageModeling(pad_id, pad_to_multiple_of=multiple)


def _encoded(
    chats: Sequence[Chat], tokenizer: PreTrainedTokenizerBase, recipe: DataRecipe
) -> list[dict[str, list[int]]]:
    """Tokens and labels of chats, cut to length; prints how many were cut or left out."""
    length = recipe.sequence_length
    special = special_ids(tokenizer)
    rows = []
    num_cut = 0
    for chat in counted(chats, "tokenising"):
        tokens, start = _tokens(chat, tokenizer, special)
        labels = [IGNORED] * start + tokens[start:]
        if recipe.loss_on == "assistant":
            labels = _labels_of_turns(chat, tokens, tokenizer)
        num_cut += len(tokens) > length
        # Nothing comes before the first token: it has no label that anything could learn.
        if any(label != IGNORED for label in labels[1:length]):
            rows.append({"input_ids": tokens[:length], "labels": labels[:length]})
    if not rows:
        raise ExitServeError(
            f"data.sequence_length={length} leaves nothing to learn of any of the {len(chats):,} "
            f"chats; raise it, or give others."
        )
    lost = len(chats) - len(rows)
    if num_cut or lost:
        print(
            f"Of {len(chats):,} chats, cut at data.sequence_length={length}: {num_cut:,}; left "
            f"out, because nothing to learn is left: {lost:,}."
        )
    return rows


def _tokens(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, special: frozenset[int]
) -> tuple[list[int], int]:
    """A chat's tokens, and how many of them are context.

    Templates may render the given part alone otherwise than at the head of the whole chat: what
    is learnt begins where the two part, as in TRL.
    """
    whole = _rendered(chat, chat.given + chat.learnt, tokenizer)
    given = _rendered(chat, chat.given, tokenizer, before_answer=True) if chat.given else []
    start = _common(given, whole)
    # A template that does not mark the end of an answer would teach the model never to stop. Of
    # the last two tokens, because some write a line end behind their mark.
    if tokenizer.eos_token_id is not None and special.isdisjoint(whole[-2:]):
        whole.append(tokenizer.eos_token_id)
    return whole, start


def end_at_turns(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Lets the model, once it is served, stop where its chat template ends an answer."""
    said = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        text = str(tokenizer.apply_chat_template(said, tokenize=False))
    except (TemplateError, TypeError, ValueError):
        return  # it wants what the rows have
    behind = tokenizer(text.rpartition("ANSWER")[2], add_special_tokens=False)["input_ids"]
    ends = [token for token in behind if token in special_ids(tokenizer)][:1]
    generation: Any = model.generation_config
    known = generation.eos_token_id
    known = known if isinstance(known, list) else [] if known is None else [known]
    if not {*ends} <= {*known}:
        generation.eos_token_id = known + ends


def _labels_of_turns(
    chat: Chat, tokens: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The tokens of the assistant's turns, and `IGNORED` for all others.

    Raises:
        ExitServeError: the template renders a turn otherwise once others follow it.
    """
    labels = [IGNORED] * len(tokens)
    for number, message in enumerate(chat.learnt):
        if message["role"] != "assistant":
            continue
        before, until = chat.learnt[:number], chat.learnt[: number + 1]
        is_last = len(until) == len(chat.learnt)
        if before:
            given = _rendered(chat, before, tokenizer, before_answer=True)
        else:  # few templates render nothing: what any other words would have before them
            other = {"role": "assistant", "content": f"~{message['content']}"}
            given = _rendered(chat, [other, *chat.learnt[1:]], tokenizer)
        start = _common(given, tokens)
        whole = tokens if is_last else _rendered(chat, until, tokenizer)
        end = _common(whole, tokens)
        # The last token may be another where what follows is joined to it.
        if end < len(whole) - 1 or end <= start:
            raise ExitServeError(
                f"{chat.name}: the chat template renders message {number + 1} otherwise once more "
                f"messages follow (as those do that drop earlier thinking), so it cannot be learnt "
                f"as it was said; set data.loss_on=completion, or all."
            )
        labels[start:end] = tokens[start:end]
    return labels


def _common(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _rendered(
    chat: Chat,
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    before_answer: bool = False,
) -> list[int]:
    try:
        encoded: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=before_answer, return_dict=True, **chat.options
        )
    except (TemplateError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ExitServeError(f"{chat.name}: the chat template refuses it: {reason}") from error
    return list(encoded["input_ids"])
