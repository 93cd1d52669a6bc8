"""Models that say one class for a whole input: their data, and running them with early exit."""
