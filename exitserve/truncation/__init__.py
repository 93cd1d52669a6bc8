"""`exitserve truncate`: the first layers of a decoder as a checkpoint."""
