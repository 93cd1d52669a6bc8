"""Times the kernels against PyTorch and Liger-Kernel, on this machine's GPU.

    python benchmarks/ops/run.py [--out FILE.json] [--small]

First the tests of the kernels run; where one fails nothing is timed. Then each operation is timed
in turn with its rivals, round after round, and its time is divided by the rival's of the same
round; the memory is the peak of one call beyond what was there before. Of the losses forward and
gradient.

- `exit_check`: PyTorch is a library's product with the head, softmax and max. The share of the
  bandwidth, that of a copy in the same run, is for the head's weights.
- `propagate_kv`: the same steps in PyTorch, written layer by layer.
- `logit_losses`: with and without a teacher. The share of the bandwidth is for reading the logits
  (and the teacher's) and writing the gradient once; two passes read twice.

Liger-Kernel, where it is installed (`pip install liger-kernel==0.8.5`), has what is nearest;
`liger.py` says what it leaves out.

Without a GPU the PyTorch forms alone are timed, with `--small`, which shows that the script runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import liger
import torch
from cases import all_cases
from timing import HEADERS, copy_bandwidth, measured

from exitserve.reporting.report import machine, machine_line, markdown_table, versions, write_json

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Tests, times, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="also write JSON")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument(
        "--skip-tests",
        action="store_true",
        help="only with --small, or where they have just passed (benchmarks/gpu/run.py)",
    )
    options = parser.parse_args()
    if not options.skip_tests:
        _refuse_unless_green()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.small:
        sys.exit("no GPU here: nothing to time. --small times the PyTorch forms.")
    print(liger.remark())
    bandwidth = copy_bandwidth(device)
    lines = [
        line
        for case in all_cases(device, options.small)
        for line in measured(case, device, bandwidth)
    ]
    found = {
        "machine": machine(),
        "versions": versions() | liger.versions(),
        "bytes_per_second": bandwidth,
        "lines": [line._asdict() for line in lines],
    }
    print(f"{machine_line(found)}\ncopy: {bandwidth / 1e9:.0f} GB/s\n")
    print(markdown_table(HEADERS, [line.cells() for line in lines]))
    if options.out is not None:
        write_json(options.out, found)


def _refuse_unless_green() -> None:
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "ops")],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    if done.returncode:
        sys.exit("the kernels' tests fail, so their times say nothing; mend them first.")


if __name__ == "__main__":
    main()
