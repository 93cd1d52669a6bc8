"""Headless language models: contrastive weight tying instead of an LM head."""
