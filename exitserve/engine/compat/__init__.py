"""Everything that depends on vLLM's version (0.32): one place to look when it moves."""
