"""Operations that multi-exit models need beyond a plain decoder's, each with two forms.

One folder an operation: `exitserve_kernels.exit_check` and so on. `reference` is PyTorch, and the
truth; `fused` is Triton, imported where it runs. `dispatch` chooses between them.
"""
