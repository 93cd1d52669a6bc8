"""The OpenAI-compatible server: vLLM's own, with our routes, response fields and metrics."""
