"""Operations that multi-exit models need beyond a plain decoder's, in two forms each.

One folder for each operation: `reference` is PyTorch and the reference; `fused` is Triton, imported
only where it runs. `dispatch` chooses between them.
"""
