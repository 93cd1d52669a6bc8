"""Full traces: what every exit check found, of servers and of the oracle."""
