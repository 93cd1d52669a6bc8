"""What a checkpoint holds: weights, exits, calibrations; where it is, and how it is changed."""
