"""NITP: next implicit token prediction."""
