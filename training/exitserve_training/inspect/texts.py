"""What a decoder writes when it is cut at each exit layer: coherence and diversity.

Aligned-training paper, section 4 and appendix C: continuations by nucleus sampling, p = 0.95.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel, PreTrainedModel

from exitserve.errors import ExitServeError
from exitserve_training.inspect.generations import coherence, diversity
from exitserve_training.parts import model_parts
from exitserve_training.tokenization import load_tokenizer

TOP_P = 0.95

Embed = Callable[[str], Tensor]
"""A text to its embedding [D]."""


@dataclass(frozen=True)
class Writing:
    """How texts are written."""

    prompts: list[list[int]]
    new_tokens: int
    seed: int


def write_texts(
    model: PreTrainedModel,
    tokenizer: Any,
    depths: Sequence[int],
    writing: Writing,
    embed: Embed | None,
) -> dict[str, Any]:
    """Continues every prompt at every depth; returns means by depth and one sample each.

    Args:
        model: a decoder in evaluation mode.
        tokenizer: its tokenizer.
        depths: where it is cut, the full depth among them.
        writing: prompts, length, seed.
        embed: for coherence; None leaves it out.
    """
    diversities: dict[str, float] = {}
    coherences: dict[str, float] = {}
    samples: dict[str, str] = {}
    # disable=None: no bar where the output is not a terminal.
    for depth in tqdm(depths, desc="writing", disable=None):
        written = []
        with cut_to(model, depth):
            for prompt in writing.prompts:
                torch.manual_seed(writing.seed)
                written.append(_continued(model, prompt, writing.new_tokens))
        diversities[str(depth)] = sum(map(diversity, written)) / len(written)
        texts = [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in written]
        samples[str(depth)] = texts[0]
        if embed is not None:
            before = [str(tokenizer.decode(ids)) for ids in writing.prompts]
            found = [
                coherence(embed(a), embed(b or " ")) for a, b in zip(before, texts, strict=True)
            ]
            coherences[str(depth)] = sum(found) / len(found)
    return {
        "prompts": len(writing.prompts),
        "new_tokens": writing.new_tokens,
        "top_p": TOP_P,
        "diversity": diversities,
        "coherence": coherences or None,
        "prompt": str(tokenizer.decode(writing.prompts[0])),
        "samples": samples,
    }


def _continued(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    generate: Any = model.generate  # loosely typed in transformers
    ids = torch.tensor([prompt], device=model.device)
    with torch.no_grad():
        whole = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=True,
            top_p=TOP_P,
            top_k=0,
        )
    written: list[int] = whole[0, len(prompt) :].tolist()
    return written


@contextmanager
def cut_to(model: PreTrainedModel, depth: int) -> Iterator[None]:
    """Lets the model have its first `depth` layers only, with the same norm and head."""
    layers = model_parts(model).layers
    owner, name = next(
        (module, child)
        for module in model.modules()
        for child, found in module.named_children()
        if found is layers
    )
    config: Any = model.config
    full = config.num_hidden_layers
    setattr(owner, name, nn.ModuleList(list(layers)[:depth]))
    config.num_hidden_layers = depth
    try:
        yield
    finally:
        setattr(owner, name, layers)
        config.num_hidden_layers = full


def sentence_embedder(path: str) -> Embed:
    """A sentence-embedding model of the user's: the mean of its last states over the tokens.

    Raises:
        ExitServeError: there is no such model.
    """
    try:
        model = AutoModel.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ExitServeError(f"no sentence model could be loaded from '{path}'.") from error
    tokenizer = load_tokenizer(path)
    model.train(False)

    def embed(text: str) -> Tensor:
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            states: Tensor = model(**inputs).last_hidden_state
        return states[0].mean(0)

    return embed
