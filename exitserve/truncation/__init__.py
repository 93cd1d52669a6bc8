"""The first layers of a decoder as a checkpoint of their own, and `exitserve truncate`."""
