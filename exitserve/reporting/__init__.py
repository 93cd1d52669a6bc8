"""How commands report: files, tables, progress, and what engines print."""
