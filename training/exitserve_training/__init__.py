"""Training of multi-exit decoders: objectives, data, recipes, and the `train` command."""

import logging

# Where bitsandbytes is installed, transformers' Trainer imports it (PEFT does), and on some CPUs it
# warns that it has not downloaded a kernel for 4-bit maps. `adapters.keep_for_training` leaves that
# kernel out, so nobody here can miss it.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: "gemm_4bit_forward" not in record.getMessage()
)
