"""What exits can give: costs of a step's parts, measured or from a table, and what follows."""

from exitserve.planning.sources import measured_costs

__all__ = ["measured_costs"]
