"""Slow, simple float32 references, which tests compare the losses with."""
