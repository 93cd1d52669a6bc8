"""Several tokens a step on runner V2: the same tests as on V1."""

# ruff: noqa: F403
from ..test_drafting import *
from ..test_drafting_families import *
from ..test_drafting_sampling import *
