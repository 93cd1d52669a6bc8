"""Early exit inside vLLM: the segmented model, per-request rows, propagation, hooks."""
