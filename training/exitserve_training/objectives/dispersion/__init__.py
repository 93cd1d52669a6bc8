"""The dispersion loss and its three alternatives (dispersion loss, table 1)."""
