"""What a pass is made of: segments of layers, checks at exits, propagation of keys and values."""
