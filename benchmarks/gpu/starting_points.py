"""What `--call real` begins from: a checkpoint, a GGUF file, or a tiny random chat model."""

from __future__ import annotations

from pathlib import Path

import torch
from stages import StageError

_CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_END = 2.5
"""Times as large as the others' is the embedding of the token that ends a turn: so a model of
random weights ends its turns now and then."""


def base_checkpoint(given: Path | None, questions: Path, out: Path) -> None:
    """Puts a base into `out`, which does not exist yet.

    Args:
        given: a checkpoint's folder, which is linked, or a GGUF file; None: a tiny random model.
        questions: text for the tiny one's tokenizer.
        out: becomes a folder.

    Raises:
        StageError: `given` is neither.
    """
    if given is None:
        tiny_chat_model(questions, out)
    elif given.suffix == ".gguf" and given.is_file():
        _unpack(given, out)
    elif (given / "config.json").is_file():
        out.symlink_to(given.resolve())
    else:
        raise StageError(f"--model '{given}' is neither a checkpoint's folder nor a GGUF file.")


def _unpack(file: Path, out: Path) -> None:
    """An ordinary bfloat16 checkpoint of a GGUF file's weights, config and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # with it, weights could not be saved
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(out)


def tiny_chat_model(text: Path, out: Path) -> None:
    """Random weights in the shape of today's small chat models: a Llama with tied embeddings, and a
    ChatML template, but no padding token.

    Args:
        text: ASCII, from which its tokenizer is made.
        out: for the checkpoint.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=_MARKS, show_progress=False)
    # The template's line ends too.
    found.train_from_iterator(
        [text.read_text(encoding="utf-8"), "system user assistant\n"], trainer
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, eos_token=_MARKS[2])  # type: ignore[no-untyped-call]
    tokenizer.chat_template = _CHATML
    tokenizer.save_pretrained(out)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        # Larger than usual, so that confidences spread out.
        initializer_range=0.12,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model.model.embed_tokens.weight[2] *= _END
    model.save_pretrained(out)
