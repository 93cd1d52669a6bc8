"""Training of multi-exit decoders: objectives, data, recipes, and the `train` command."""
