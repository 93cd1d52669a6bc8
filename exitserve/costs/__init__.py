"""What the parts of a decode step cost, in bytes or in time, and what follows of wall speedup."""
