"""Tokenizers: train a byte-level BPE on the run's documents; what others leave open."""

import sys
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from exitserve_training.parts import Task

END_OF_TEXT = "<|endoftext|>"
"""Ends every document, and so also stands before the next: both eos and bos."""
PAD = "<|pad|>"
MASK = "<|mask|>"
CLASS = "<|class|>"

# Words with the one character before them (" return", "_name", ".join"), up to three digits,
# punctuation, line ends, then runs of spaces: an indentation is one token, not one per space.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# No roles and no special tokens: the model is trained on text, not on chats.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{{ '\n' }}{% endfor %}"


def train_bpe(
    texts: Iterable[str], vocab_size: int, max_length: int, *, task: Task = "next token"
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE with `vocab_size` entries; every text can be encoded and decoded.

    Args:
        texts: training documents.
        vocab_size: entries, bytes and special tokens included.
        max_length: the model's context in tokens, written into the tokenizer's config.
        task: what the model predicts. Masked models get a mask token; classifiers a token that
            starts each text, whose state is classified, and one that ends it.
    """
    extra = {"hidden token": {"mask_token": MASK}, "class": {"cls_token": CLASS}}.get(task, {})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD, *extra.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stdout.isatty(),  # to a pipe it is empty lines, and ends with `head`
    )
    tokenizer.train_from_iterator(texts, trainer)
    if task == "class":
        ends = [(token, tokenizer.token_to_id(token)) for token in (CLASS, END_OF_TEXT)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{CLASS} $A {END_OF_TEXT}",
            pair=f"{CLASS} $A {END_OF_TEXT} $B:1 {END_OF_TEXT}:1",
            special_tokens=ends,
        )
    wrap: Any = PreTrainedTokenizerFast  # untyped in transformers
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        **extra,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )
    return wrapped


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills the rows of a batch up: TRL's convention where there is no padding token.

    That is the end of text, which Llama 3's tokenizer, for one, leaves as the only choice. Masks
    come from lengths, so that a real end of text is learnt all the same, and any token would do.
    """
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(number for number in known if number is not None)


def with_padding(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer of a classifier, which needs a padding token itself: batches of texts are
    padded when it serves, too."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding_id(tokenizer))
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that no text contains, such as ends of turns."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder  # untyped in transformers
    marks = (number for number, token in added.items() if token.special)
    return frozenset({*tokenizer.all_special_ids, *marks})
