"""Options of headless training. Imports no torch."""

from typing import Literal

from exitserve_training.objectives.options import ObjectiveOptions


class HeadlessOptions(ObjectiveOptions):
    """Contrastive weight tying instead of a head (headless language models, section 3.2)."""

    implementation = "exitserve_training.objectives.headless.objective:Headless"
    is_main = True

    name: Literal["headless"] = "headless"
