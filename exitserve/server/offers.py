"""What requests of a server may ask for, as `GET /exitserve/stats` tells clients with a choice."""

from typing import Any

from exitserve.policy import ExitRules


def offers(rules: ExitRules, *, chats: bool) -> dict[str, Any]:
    """Modes, criterion, and what the calibration promises, ascending by agreement; and whether the
    model has a chat template (`chats`)."""
    found = rules.calibrated
    points = () if found is None else (*found.points, found.chosen)
    promising = {one.agreement: one for one in points if one.agreement is not None}
    layers = rules.exit_layers
    return {
        "modes": list(rules.modes),
        "criterion": rules.criterion,
        "chat": chats,
        "calibrated_mode": None if found is None else found.mode,
        "promises": [
            {
                "agreement": agreement,
                "thresholds": dict(promising[agreement].at(layers).thresholds),
                "found": dict(promising[agreement].found),
            }
            for agreement in sorted(promising)
        ],
    }
