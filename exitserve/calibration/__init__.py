"""Which exits, which thresholds, at what loss: chosen on text, with a promise that is tested."""
