"""Operations that multi-exit models need beyond a plain decoder's, each with two forms.

`reference` is PyTorch, and the truth; `fused` is Triton, imported where it is used, so that this
package imports without Triton and without a GPU. `dispatch` chooses between them.
"""

from exitserve_kernels.compact_rows import Batch, Compacted, compact_rows
from exitserve_kernels.exit_check import (
    ExitCheck,
    FinalNorm,
    exit_check,
    finish,
    join,
    summarise_slice,
)
from exitserve_kernels.propagate_kv import Caches, KeyNorm, Rotary

__all__ = [
    "Batch",
    "Caches",
    "Compacted",
    "ExitCheck",
    "FinalNorm",
    "KeyNorm",
    "Rotary",
    "compact_rows",
    "exit_check",
    "finish",
    "join",
    "summarise_slice",
]
