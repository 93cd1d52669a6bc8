"""Slow, obviously right float32 references of the losses, which tests hold them to."""
