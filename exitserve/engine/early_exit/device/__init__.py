"""The loop whose exits the device decides, as on a GPU."""
