"""Text to calibrate the bundled model on, and other text to hold its promises to.

    python benchmarks/calibration_texts.py --out DIR [--prose FILE]

Writes .jsonl files with one piece of text a row: `code-a` and `code-b`, Python files of installed
packages that the model's recipe leaves out because their packages are large; `tests-a`, files of
tests, a kind of code that the recipe leaves out altogether; `mixed-a` and `mixed-b`, both kinds of
code; `prose`, paragraphs of a text file.

Which files a recipe draws from a large package depends on all that is installed, so a few of these
(at most its 3 MB of each large package) may have been trained on elsewhere. A promise needs draws
from the same text, which these are, not text that training has not seen.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exitserve_training.recipe import load_recipe
from exitserve_training.sources import load_split

RECIPE = Path(__file__).parent.parent / "training" / "recipes" / "bundled" / "2-longer.yaml"
TESTS = ("/test/", "/tests/", "/testing/", "/test_")
CHARACTERS = 3_500
"""Of a piece: more than a window needs."""
LEAST = 1_000
"""Shorter texts rarely fill a window."""
SEED = 5


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prose", type=Path, metavar="FILE", help="a text file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    used = _texts()
    everything = _texts(max_package_bytes=None)
    unused = _drawn(text for name, text in everything.items() if name not in used)
    half = len(unused) // 2
    _write(args.out / "code-a.jsonl", unused[:half])
    _write(args.out / "code-b.jsonl", unused[half:])
    tests = _texts(max_package_bytes=None, exclude=[])
    tested = _drawn(text for name, text in tests.items() if any(part in name for part in TESTS))
    _write(args.out / "tests-a.jsonl", tested)
    middle = len(tested) // 2
    for name, own in (
        ("mixed-a", unused[:half] + tested[:middle]),
        ("mixed-b", unused[half:] + tested[middle:]),
    ):
        random.Random(SEED).shuffle(own)
        _write(args.out / f"{name}.jsonl", own)
    if args.prose:
        text = args.prose.read_text(encoding="utf-8-sig")
        starts = range(0, len(text), CHARACTERS)
        _write(args.out / "prose.jsonl", _drawn(text[at : at + CHARACTERS] for at in starts))


def _texts(**changes: Any) -> dict[str, str]:
    """Documents of the model's recipe, by name, after changes of what it reads."""
    recipe = load_recipe(RECIPE)
    split = load_split(recipe.data.model_copy(update=changes), recipe.seed)
    return {document.name: document.text for document in (*split.train, *split.validation)}


def _drawn(texts: Iterable[str]) -> list[str]:
    """A piece of each text that is long enough, in random order."""
    draw = random.Random(SEED)
    pieces = []
    for text in texts:
        if len(text) >= LEAST:
            start = draw.randrange(max(1, len(text) - CHARACTERS))
            # From the start of a line.
            start = text.rfind("\n", 0, start) + 1
            pieces.append(text[start : start + CHARACTERS])
    draw.shuffle(pieces)
    return pieces


def _write(path: Path, pieces: list[str]) -> None:
    rows = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
    path.write_text(rows, encoding="utf-8")
    print(f"{path}: {len(pieces)} pieces")


if __name__ == "__main__":
    main()
