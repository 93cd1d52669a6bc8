"""Aligned training: the aligned loss, plain cross-entropy, and what the paper compares with."""
