"""Training of multi-exit decoders: objectives, data, recipes, and the `train` command."""

import logging

# Where bitsandbytes is installed, transformers imports it for everybody, and it then warns that an
# optional package of faster kernels is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
