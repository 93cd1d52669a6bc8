"""`python -m exitserve` is `exitserve`."""

import sys

from exitserve.cli import main

sys.exit(main())
