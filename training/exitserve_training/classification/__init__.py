"""Classifiers of texts and images: their data, and running them with early exit."""
