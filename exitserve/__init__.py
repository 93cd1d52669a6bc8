"""exitserve: decoders that stop early, trained with one loss and served on vLLM.

Importing this package imports nothing heavy; each module says what it needs.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("exitserve")
except PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0.0.0"
