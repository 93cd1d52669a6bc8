"""Operations that multi-exit models need beyond a plain decoder's, each with two forms.

`reference` is PyTorch, and the truth; `fused` is Triton, imported where it is used, so that this
package imports without Triton and without a GPU. `dispatch` chooses between them.
"""

from exitserve_kernels.exit_check import (
    ExitCheck,
    FinalNorm,
    exit_check,
    finish,
    join,
    summarise_slice,
)

__all__ = ["ExitCheck", "FinalNorm", "exit_check", "finish", "join", "summarise_slice"]
