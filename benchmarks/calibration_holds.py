"""Whether a calibrated checkpoint keeps its promises on text that the calibration never saw.

    python benchmarks/calibration_holds.py MODEL in-domain.jsonl another.jsonl --out FILE.json

Every target of the checkpoint is put to fresh windows of each file, and to what the model writes
after prompts from it. In-domain, an agreement below the target would be an error of the test, which
its level allows in one calibration of twenty; on other text nothing was promised, and the table
shows how much that matters.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from exitserve.agreement import FullDepthPass
from exitserve.calibration.outcomes import Piece, measure_outcome, run_at_full_depth, summarise
from exitserve.calibration.pieces import independent_windows, model_continuations
from exitserve.checkpoint.block import read_multi_exit
from exitserve.policy import ExitPolicy
from exitserve.reference import Reference, load_reference
from exitserve.reporting.report import machine, markdown_table, versions, write_json
from exitserve.windows import load_tokenizer, read_documents, windows_of

SEED = 7
"""Another choice of windows than the calibration's own."""


def pieces_of(args: argparse.Namespace, file: str, reference: Reference) -> list[Piece]:
    """Fresh windows of a file, and continuations after the prompts of others."""
    documents, tokenizer = read_documents(file), load_tokenizer(args.model)
    every = windows_of(documents, tokenizer, args.window, sys.maxsize, SEED)
    windows = independent_windows(every, 2 * args.windows, SEED, running=documents.running)
    half = len(windows) // 2
    prompts = [window.token_ids[: args.prompt_tokens] for window in windows[half:]]
    tokens = args.window - args.prompt_tokens
    written = model_continuations(
        reference, prompts, tokens, args.temperature, SEED, lambda _: None
    )
    text = [Piece(one.token_ids, args.prompt_tokens, "text") for one in windows[:half]]
    return [*text, *written]


def rows_of(args: argparse.Namespace, file: str, reference: Reference) -> list[dict[str, Any]]:
    """One entry for each target and source."""
    block = read_multi_exit(args.model)
    if block is None or block.calibration is None:
        raise SystemExit(f"{args.model} is not calibrated.")
    calibration = block.calibration
    pieces = pieces_of(args, file, reference)
    full: dict[Piece, FullDepthPass] = {
        piece: run_at_full_depth(reference, piece) for piece in pieces
    }
    promised = [
        (mode, point)
        for mode, found in calibration.by_mode().items()
        for point in sorted((*found.points, found.chosen), key=lambda one: one.agreement or 0.0)
    ]
    rows = []
    for mode, point in promised:
        policy = ExitPolicy.calibrated(point, mode=mode)  # type: ignore[arg-type]
        outcomes = [measure_outcome(reference, piece, full[piece], policy) for piece in pieces]
        for source in ("text", "generated"):
            own = [one for one in outcomes if one.source == source]
            found = summarise(own)
            error = statistics.stdev(one.agreement for one in own) / math.sqrt(len(own))
            rows.append(
                {
                    "file": Path(file).name,
                    "source": source,
                    "mode": mode,
                    "target": point.agreement,
                    "windows": len(own),
                    "agreement": round(found.agreement, 4),
                    "standard_error": round(error, 4),
                    "mean_depth": round(found.mean_depth, 3),
                    "depth_speedup": round(reference.parts.num_layers / found.mean_depth, 3),
                    "perplexity": round(found.perplexity, 3),
                    "full_depth_perplexity": round(found.full_perplexity, 3),
                }
            )
    return rows


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    reference = load_reference(args.model)
    rows = [row for file in args.files for row in rows_of(args, file, reference)]
    keys = list(rows[0])
    print(markdown_table(keys, [[str(row[key]) for key in keys] for row in rows]))
    write_json(args.out, {"rows": rows, "machine": machine(), "versions": versions()})


if __name__ == "__main__":
    main()
