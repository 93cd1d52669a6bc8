"""Peak memory and CPU time of a whole training run on text files of growing size, read in order.

    python benchmarks/streamed_memory.py --text NOVELS/*.txt --gigabytes 0.1,1 --out DIR
    python benchmarks/streamed_memory.py --text NOVELS/*.txt --gigabytes 10 --words --out DIR

Each size is a text file made of the given texts, over and over, every copy headed by a number of
its own, and `exitserve train` on it: all of the file packed, ten steps of a tiny model. The file
and the run are deleted before the next. `--words` takes a tokenizer of whole words in place of a
byte-level BPE: five times as fast, for sizes that would take an hour. Needs three times the
largest size on the disk of `--out`, and of TMPDIR.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import yaml
from resident_memory import resident
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordLevelTrainer
from transformers import PreTrainedTokenizerFast

from exitserve.reporting.report import markdown_table

GB = 10**9
MIB = 2**20
POLL_S = 0.1

RECIPE = {
    "config": {
        "architecture": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "tokenizer": {"train_bpe": {"vocab_size": 8192}},
    "exit_layers": [1, 2],
    "training": {"max_steps": 10, "per_device_train_batch_size": 4, "save_strategy": "no"},
}


def written(file: Path, texts: Sequence[str], size: int) -> None:
    """Writes so many bytes of text, whose copies differ in a heading."""
    with file.open("w", encoding="utf-8") as out:
        for number in itertools.count():
            text = f"Book {number}\n\n{texts[number % len(texts)]}\n"
            left = size - out.tell()
            if left <= len(text):
                out.write(text[:left])
                return
            out.write(text)


def tokenizer_of_words(folder: Path, texts: Sequence[str]) -> str:
    """A tokenizer whose tokens are the 32,000 most frequent words; returns its folder."""
    words = Tokenizer(WordLevel(unk_token="<unknown>"))
    words.pre_tokenizer = WhitespaceSplit()
    trainer = WordLevelTrainer(vocab_size=32_000, special_tokens=["<unknown>", "<end>"])
    words.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, unk_token="<unknown>", eos_token="<end>"
    )
    wrapped.save_pretrained(folder)
    return str(folder)


def trained(folder: Path, file: Path, tokenizer: str | None) -> dict[str, float]:
    """One run of the command: tokens, CPU seconds, and the peaks of its memory in bytes."""
    recipe = {**RECIPE, "output_dir": str(folder / "run")}
    if tokenizer is not None:
        recipe["tokenizer"] = {"path": tokenizer}
    recipe["data"] = {"files": [str(file)], "order": "source", "sequence_length": 512}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "exitserve", "train", str(folder / "recipe.yaml")]
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        peaks: dict[str, float] = {}
        while process.poll() is None:
            for kind, now in resident(process.pid).items():
                peaks[kind] = max(peaks.get(kind, 0), now)
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                peaks["cpu"] = times.user + times.system
            time.sleep(POLL_S)
    if process.returncode != 0:
        raise SystemExit((folder / "log").read_text(encoding="utf-8"))
    report = json.loads((folder / "run" / "report.json").read_text(encoding="utf-8"))
    return {"tokens": report["train_tokens"], **peaks}


def main() -> None:
    """Prints a table, a line a size."""
    told = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=told)
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="UTF-8 texts")
    parser.add_argument("--gigabytes", default="0.1,1", help="sizes, 10^9 bytes (0.1,1)")
    parser.add_argument("--words", action="store_true", help="tokens are words")
    parser.add_argument("--out", type=Path, required=True, help="folder with enough room")
    args = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in args.text]
    args.out.mkdir(parents=True)
    tokenizer = tokenizer_of_words(args.out / "words", texts) if args.words else None
    rows = []
    for size in map(float, args.gigabytes.split(",")):
        folder = args.out / f"{size:g}"
        folder.mkdir(parents=True)
        written(folder / "text.txt", texts, round(size * GB))
        found = trained(folder, folder / "text.txt", tokenizer)
        shutil.rmtree(folder)
        rows.append(
            [
                f"{size:g} GB",
                f"{found['tokens'] / 1e6:,.0f} M",
                f"{found['cpu'] / 60:.1f} min",
                f"{found['RssAnon'] / MIB:,.0f} MiB",
                f"{found['RssFile'] / MIB:,.0f} MiB",
            ]
        )
        print(markdown_table(["text", "tokens", "CPU time", "own memory", "mapped files"], rows))


if __name__ == "__main__":
    main()
