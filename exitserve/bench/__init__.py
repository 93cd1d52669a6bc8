"""`exitserve bench`: compares early exit with plain vLLM, interleaved on one machine."""
