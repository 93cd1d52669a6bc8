"""A whole calibration: text, gates, proposals under each criterion, order, test, promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exitserve.agreement import FullDepth
from exitserve.calibration.choice import (
    Candidate,
    Trial,
    cost_of,
    in_order,
    kept,
    mean_risk,
)
from exitserve.calibration.outcomes import Outcome, Piece, full_depth_of, outcome, summary
from exitserve.calibration.pieces import Parts
from exitserve.calibration.proposals import (
    LOW_PRICES,
    PRICES,
    Proposal,
    between,
    end_thresholds,
    proposals,
)
from exitserve.calibration.risks import Target
from exitserve.calibration.scores import ExitScores, exit_scores, fitted_gates
from exitserve.calibration_record import Calibration, OperatingPoint
from exitserve.costs import TokenCosts
from exitserve.gates import Gate
from exitserve.policy import Mode
from exitserve.progress import StepProgress
from exitserve.reference import Reference
from exitserve_kernels.exit_check import CRITERIA, criterion_of

COMPARED = 50
"""Pieces of each source on which criteria are compared; the winner sees all."""
TOO_FAR = 0.06
"""Choices this much above the risk of the easiest target are not looked at."""
FULL_DEPTH = OperatingPoint(agreement=None, thresholds={}, eos_thresholds={})
"""What `auto` means where nothing could be promised."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a calibration is asked to do."""

    target: Target
    """What `auto` must keep."""
    others: tuple[Target, ...]
    """Of agreement, for requests that ask for another."""
    mode: Mode
    delta: float
    """One less the confidence level."""
    costs: TokenCosts
    break_even: Mapping[int, float]
    """Of the check schedule, as it is served."""
    fewest_ends: int
    """Early ends of sequence to be seen at a layer before it may have any."""
    most_tokens: int
    """Decode tokens of a piece."""


@dataclass(frozen=True, kw_only=True)
class Promised:
    """What came of one target."""

    target: Target
    point: OperatingPoint | None
    """None where nothing could be promised: full depth."""
    kept: int
    """Choices that passed the test."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything that a calibration found."""

    criterion: str
    gates: Mapping[int, Gate]
    promised: tuple[Promised, ...]
    """The asked target first."""
    curves: Mapping[str, Sequence[Candidate]]
    """By criterion, the choices as the comparison saw them, the safest first."""
    scores: Mapping[int, ExitScores]
    """Of the pieces for selection, at full depth."""

    def calibration(self, asked: Asked, provenance: Mapping[str, Any]) -> Calibration:
        """What goes into the checkpoint."""
        first, *others = self.promised
        points = [one.point for one in others if one.point is not None]
        return Calibration(
            target=first.target.name,
            mode=asked.mode,
            criterion=self.criterion,
            confidence_level=1.0 - asked.delta,
            num_layers=asked.costs.num_layers,
            chosen=first.point or FULL_DEPTH,
            points=tuple(sorted(points, key=lambda one: one.agreement or 0.0)),
            provenance=provenance,
        )


class Calibrator:
    """Runs pieces through the oracle; what full depth says of each is kept."""

    def __init__(self, reference: Reference, asked: Asked, progress: StepProgress) -> None:
        self._reference, self._asked, self._progress = reference, asked, progress
        self._full: dict[Piece, FullDepth] = {}

    def run(self, parts: Parts) -> Found:
        """Calibrates on the pieces."""
        steps = _Steps(self._progress)
        with_gates = steps.of("fitting gates", len(parts.fit))
        gates = fitted_gates(self._reference, parts.fit, with_gates) if parts.fit else {}
        advance = steps.of("reading every exit", len(parts.select))
        scores = exit_scores(self._reference, parts.select, gates, advance)
        few = _first_of_each(parts.select, COMPARED)
        criteria = [*map(str, CRITERIA), *(["gate"] if gates else [])]
        curves: dict[str, list[Candidate]] = {}
        prices = PRICES if self._asked.target.grows else (*PRICES, *LOW_PRICES)
        for criterion in criteria:
            found = self._proposed(scores, criterion, prices)
            advance = steps.of(f"comparing criteria: {criterion}", len(found) * len(few))
            curves[criterion] = self._selected(found, scores, gates, few, advance)
        criterion = min(criteria, key=lambda one: self._cost_at_target(curves[one]))
        candidates = self._refined(curves[criterion], criterion, scores, gates, parts, steps)
        promised = self._promised(candidates, criterion, gates, parts.test, steps)
        return Found(
            criterion=criterion, gates=gates, promised=promised, curves=curves, scores=scores
        )

    def _proposed(
        self, scores: Mapping[int, ExitScores], criterion: str, prices: Sequence[float]
    ) -> list[Proposal]:
        propagates = self._asked.mode == "confidence"
        return proposals(scores, criterion, self._asked.costs, propagates=propagates, prices=prices)

    def _selected(
        self,
        found: Iterable[Proposal],
        scores: Mapping[int, ExitScores],
        gates: Mapping[int, Gate],
        pieces: Sequence[Piece],
        advance: Callable[[], None],
    ) -> list[Candidate]:
        """Runs proposals, the safest first, until they are of no use for any target."""
        candidates = []
        for proposal in found:
            candidate = Candidate(proposal, self._ends(scores, proposal), ())
            outcomes = []
            judge = self._judge(proposal.criterion, gates)
            for piece in pieces:
                outcomes.append(self._outcome(candidate, judge, piece))
                advance()
            candidates.append(replace(candidate, selected=tuple(outcomes)))
            targets = (self._asked.target, *self._asked.others)
            if all(self._is_too_far(candidates[-1], target) for target in targets):
                break
        return in_order(candidates, self._asked.target)

    @staticmethod
    def _is_too_far(candidate: Candidate, target: Target) -> bool:
        risk = mean_risk(candidate.selected, target)
        return target.grows and risk > target.limit + TOO_FAR

    def _ends(self, scores: Mapping[int, ExitScores], proposal: Proposal) -> dict[int, float]:
        least = self._asked.target.agreement or 0.99
        return end_thresholds(scores, proposal, least, self._asked.fewest_ends)

    def _outcome(self, candidate: Candidate, judge: Reference, piece: Piece) -> Outcome:
        if piece not in self._full:
            self._full[piece] = full_depth_of(self._reference, piece)
        return outcome(judge, piece, self._full[piece], candidate.policy(self._asked.mode))

    def _judge(self, criterion: str, gates: Mapping[int, Gate]) -> Reference:
        """The oracle with a criterion, as it is served."""
        own, ends = self._reference, self._reference.eos_token_ids.tolist()
        if criterion == "gate":
            return Reference(own.model, own.exit_layers, ends, gates=gates)
        rates = self._asked.break_even
        return Reference(own.model, own.exit_layers, ends, rates, criterion_of(criterion))

    def _cost(self, candidate: Candidate) -> float:
        return cost_of(summary(candidate.selected), self._asked.costs, self._asked.mode)

    def _cost_at_target(self, curve: Sequence[Candidate]) -> float:
        """What a criterion's choices cost where they just keep the target; full depth if never."""
        target = self._asked.target
        risks = [mean_risk(one.selected, target) for one in curve]
        inside = [i for i, risk in enumerate(risks) if risk <= target.limit]
        if not inside:
            return 1.0
        if not target.grows:  # the least loss is what counts
            return min(1.0 - summary(curve[i].selected).agreement for i in inside)
        last = inside[-1]
        cost = self._cost(curve[last])
        if last + 1 < len(curve):
            share = (target.limit - risks[last]) / (risks[last + 1] - risks[last])
            cost += share * (self._cost(curve[last + 1]) - cost)
        return min(1.0, cost)

    def _refined(
        self,
        curve: Sequence[Candidate],
        criterion: str,
        scores: Mapping[int, ExitScores],
        gates: Mapping[int, Gate],
        parts: Parts,
        steps: _Steps,
    ) -> list[Candidate]:
        """The criterion's choices with more of them near the targets, on all of selection."""
        found = {one.proposal for one in curve}
        for target in (self._asked.target, *self._asked.others):
            ordered = in_order(curve, target)
            risks = [mean_risk(one.selected, target) for one in ordered]
            if target.grows and risks and risks[0] > target.limit:
                nobody = Proposal(criterion, (), 2.0 * PRICES[0])
                found |= set(between(nobody, ordered[0].proposal))
            for one, other, low, high in zip(ordered, ordered[1:], risks, risks[1:], strict=False):
                if low <= target.limit < high:
                    found |= set(between(one.proposal, other.proposal))
        by_price = sorted(found, key=lambda one: one.price, reverse=True)
        advance = steps.of(f"measuring choices: {criterion}", len(found) * len(parts.select))
        return self._selected(by_price, scores, gates, parts.select, advance)

    def _promised(
        self,
        candidates: Sequence[Candidate],
        criterion: str,
        gates: Mapping[int, Gate],
        pieces: Sequence[Piece],
        steps: _Steps,
    ) -> tuple[Promised, ...]:
        judge = self._judge(criterion, gates)
        trial = Trial(
            run=lambda candidate, index: self._outcome(candidate, judge, pieces[index]),
            sources=[piece.source for piece in pieces],
            delta=self._asked.delta,
            most_tokens=self._asked.most_tokens,
        )
        found = []
        for target in (self._asked.target, *self._asked.others):
            tried = steps.of(f"testing {target.name}", len(candidates))
            keeping = kept(candidates, target, trial, tried)
            best = self._best(keeping, target)
            point = None if best is None else self._point(best, target, trial)
            found.append(Promised(target=target, point=point, kept=len(keeping)))
        return tuple(found)

    def _best(self, keeping: Sequence[Candidate], target: Target) -> Candidate | None:
        if not target.grows:
            return max(keeping, key=lambda one: summary(one.selected).agreement, default=None)
        cheaper = [one for one in keeping if self._cost(one) < 1.0]
        return min(cheaper, key=self._cost, default=None)

    def _point(self, best: Candidate, target: Target, trial: Trial) -> OperatingPoint:
        """The choice with its promise, and what all of the test's text shows of it."""
        found = trial.found(best)
        return replace(
            best.point,
            agreement=target.agreement,
            found={
                "agreement": round(found.agreement, 5),
                "mean_depth": round(found.mean_depth, 4),
                "perplexity": round(found.perplexity, 4),
                "full_depth_perplexity": round(found.full_perplexity, 4),
                "cost": round(cost_of(found, self._asked.costs, self._asked.mode), 4),
                "checks": round(found.checks, 4),
            },
        )


class _Steps:
    """Tells progress, one kind of work after the other."""

    def __init__(self, progress: StepProgress) -> None:
        self._progress = progress

    def of(self, doing: str, total: int) -> Callable[[], None]:
        """Begins a kind of work of `total` steps; the result is called after each."""
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            self._progress(doing, done, total)

        self._progress(doing, 0, total)
        return advance


def _first_of_each(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """The first `count` pieces of each source."""
    seen: dict[str, int] = {}
    chosen = []
    for piece in pieces:
        seen[piece.source] = seen.get(piece.source, 0) + 1
        if seen[piece.source] <= count:
            chosen.append(piece)
    return chosen
