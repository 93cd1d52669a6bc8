"""Several tokens a step: the model's first layers draft, and full depth judges them at once.

vLLM's speculative decoding does the work: it schedules drafts, judges them in one ordinary pass of
the model, and discards what it rejects. Ours are the drafts (`cpu` and `gpu`, for vLLM's two model
runners), which come from the same layers, norm, head and cache, so there is no second copy of
anything; and, in mode "defer", which tokens are final without full depth (`forward`, `requests`).
"""
