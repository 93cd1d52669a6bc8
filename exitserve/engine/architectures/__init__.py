"""What differs between architectures."""
