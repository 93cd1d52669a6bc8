"""What vLLM calls: one module for each of its hooks."""
