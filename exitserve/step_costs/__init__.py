"""What the parts of a decode step cost: timed on this machine, or from an accelerator's figures."""

from exitserve.step_costs.sources import measured_costs

__all__ = ["measured_costs"]
