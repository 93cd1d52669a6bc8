"""`exitserve bench`: early exit beside plain vLLM, interleaved on one machine."""
