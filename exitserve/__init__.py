"""exitserve: decoders that stop early, trained with one loss and served on vLLM.

Importing this package imports nothing heavy; each module says what it needs.
"""

__version__ = "0.1.0"
