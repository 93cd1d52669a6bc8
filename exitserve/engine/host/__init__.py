"""The loop whose exits the host decides, as on a CPU."""
