"""A calibration from its text to its promises: gates, proposals for each criterion, tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from exitserve.agreement import FullDepthPass
from exitserve.calibration.choice import (
    Choice,
    PromiseTest,
    by_risk,
    mean_risk,
    passing_choices,
    relative_cost,
)
from exitserve.calibration.outcomes import (
    Outcome,
    Piece,
    measure_outcome,
    run_at_full_depth,
    summarise,
)
from exitserve.calibration.pieces import PieceSplit
from exitserve.calibration.proposals import (
    LOW_PRICES,
    PRICES,
    Proposal,
    end_thresholds,
    interpolated,
    propose,
)
from exitserve.calibration.risks import Target
from exitserve.calibration.scores import ExitScores, exit_scores, fit_gates
from exitserve.calibration_record import Calibration, OperatingPoint
from exitserve.costs import TokenCosts
from exitserve.gates import Gate
from exitserve.policy import Mode
from exitserve.progress import StepProgress
from exitserve.reference import Reference
from exitserve_kernels.exit_check import CRITERIA, criterion_of

COMPARED = 50
"""Pieces of each source on which criteria are compared; the winner is measured on all."""
TOO_FAR = 0.06
"""Once a choice is riskier than every target by this much, riskier ones are not measured."""
FULL_DEPTH = OperatingPoint(agreement=None, thresholds={}, eos_thresholds={})
"""What `auto` means where nothing could be promised."""


@dataclass(frozen=True, kw_only=True)
class CalibrationJob:
    """What a calibration was asked to do."""

    target: Target
    """What the thresholds of `auto` must keep."""
    others: tuple[Target, ...]
    """Targets of agreement, for requests that send `exit_target`."""
    mode: Mode
    delta: float
    """One less the confidence level."""
    costs: TokenCosts
    break_even: Mapping[int, float]
    """Success rates for the check schedule, by exit layer, as the server has them."""
    fewest_ends: int
    """A layer must have seen this many ends of sequence before any may exit there."""
    most_tokens: int
    """Most decode tokens of a piece."""


@dataclass(frozen=True, kw_only=True)
class TargetResult:
    """The thresholds found for one target, if any."""

    target: Target
    point: OperatingPoint | None
    """None where nothing could be promised, which means full depth."""
    kept: int
    """Choices that passed the test."""


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """What a calibration found."""

    criterion: str
    gates: Mapping[int, Gate]
    promised: tuple[TargetResult, ...]
    """The target that was asked for first."""
    curves: Mapping[str, Sequence[Choice]]
    """By criterion, the choices measured when criteria were compared, the safest first."""
    scores: Mapping[int, ExitScores]
    """By exit layer, on the pieces for selection at full depth."""

    def calibration(self, job: CalibrationJob, provenance: Mapping[str, Any]) -> Calibration:
        """The record for the checkpoint."""
        first, *others = self.promised
        points = [one.point for one in others if one.point is not None]
        return Calibration(
            target=first.target.name,
            mode=job.mode,
            criterion=self.criterion,
            confidence_level=1.0 - job.delta,
            num_layers=job.costs.num_layers,
            chosen=first.point or FULL_DEPTH,
            points=tuple(sorted(points, key=lambda one: one.agreement or 0.0)),
            provenance=provenance,
        )


class Calibrator:
    """Runs pieces through the oracle, and keeps the full-depth pass of each."""

    def __init__(self, reference: Reference, job: CalibrationJob, progress: StepProgress) -> None:
        self._reference, self._job, self._progress = reference, job, progress
        self._full: dict[Piece, FullDepthPass] = {}

    def calibrate(self, parts: PieceSplit) -> CalibrationResult:
        """Fits gates, chooses the criterion, and tests choices for every target."""
        steps = _StepCounter(self._progress)
        with_gates = steps.begin("fitting gates", len(parts.fit))
        gates = fit_gates(self._reference, parts.fit, with_gates) if parts.fit else {}
        advance = steps.begin("reading every exit", len(parts.select))
        scores = exit_scores(self._reference, parts.select, gates, advance)
        few = _first_of_each(parts.select, COMPARED)
        criteria = [*map(str, CRITERIA), *(["gate"] if gates else [])]
        curves: dict[str, list[Choice]] = {}
        prices = PRICES if self._job.target.grows else (*PRICES, *LOW_PRICES)
        for criterion in criteria:
            found = self._proposed(scores, criterion, prices)
            advance = steps.begin(f"comparing criteria: {criterion}", len(found) * len(few))
            curves[criterion] = self._selected(found, scores, gates, few, advance)
        criterion = min(criteria, key=lambda one: self._cost_at_target(curves[one]))
        choices = self._refined(curves[criterion], criterion, scores, gates, parts, steps)
        promised = self._promised(choices, criterion, gates, parts.test, steps)
        return CalibrationResult(
            criterion=criterion, gates=gates, promised=promised, curves=curves, scores=scores
        )

    def _proposed(
        self, scores: Mapping[int, ExitScores], criterion: str, prices: Sequence[float]
    ) -> list[Proposal]:
        propagates = self._job.mode == "confidence"
        return propose(scores, criterion, self._job.costs, propagates=propagates, prices=prices)

    def _selected(
        self,
        found: Iterable[Proposal],
        scores: Mapping[int, ExitScores],
        gates: Mapping[int, Gate],
        pieces: Sequence[Piece],
        advance: Callable[[], None],
    ) -> list[Choice]:
        """Measures proposals, the safest first, until they are too risky for every target."""
        choices = []
        for proposal in found:
            choice = Choice(proposal, self._ends(scores, proposal), ())
            outcomes = []
            oracle = self._oracle_with(proposal.criterion, gates)
            for piece in pieces:
                outcomes.append(self._outcome(choice, oracle, piece))
                advance()
            choices.append(replace(choice, outcomes=tuple(outcomes)))
            targets = (self._job.target, *self._job.others)
            if all(self._is_too_far(choices[-1], target) for target in targets):
                break
        return by_risk(choices, self._job.target)

    @staticmethod
    def _is_too_far(choice: Choice, target: Target) -> bool:
        risk = mean_risk(choice.outcomes, target)
        return target.grows and risk > target.limit + TOO_FAR

    def _ends(self, scores: Mapping[int, ExitScores], proposal: Proposal) -> dict[int, float]:
        least = self._job.target.agreement or 0.99
        return end_thresholds(scores, proposal, least, self._job.fewest_ends)

    def _outcome(self, choice: Choice, oracle: Reference, piece: Piece) -> Outcome:
        if piece not in self._full:
            self._full[piece] = run_at_full_depth(self._reference, piece)
        return measure_outcome(oracle, piece, self._full[piece], choice.policy(self._job.mode))

    def _oracle_with(self, criterion: str, gates: Mapping[int, Gate]) -> Reference:
        """The oracle as a server runs it under a criterion."""
        own, ends = self._reference, self._reference.eos_token_ids.tolist()
        if criterion == "gate":
            return Reference(own.model, own.exit_layers, ends, gates=gates)
        rates = self._job.break_even
        return Reference(own.model, own.exit_layers, ends, rates, criterion_of(criterion))

    def _cost(self, choice: Choice) -> float:
        return relative_cost(summarise(choice.outcomes), self._job.costs, self._job.mode)

    def _cost_at_target(self, curve: Sequence[Choice]) -> float:
        """Cost at which a criterion just keeps the target, interpolated; full depth's if never."""
        target = self._job.target
        risks = [mean_risk(one.outcomes, target) for one in curve]
        inside = [i for i, risk in enumerate(risks) if risk <= target.limit]
        if not inside:
            return 1.0
        if not target.grows:  # at a given depth, the least disagreement counts
            return min(1.0 - summarise(curve[i].outcomes).agreement for i in inside)
        last = inside[-1]
        cost = self._cost(curve[last])
        if last + 1 < len(curve):
            share = (target.limit - risks[last]) / (risks[last + 1] - risks[last])
            cost += share * (self._cost(curve[last + 1]) - cost)
        return min(1.0, cost)

    def _refined(
        self,
        curve: Sequence[Choice],
        criterion: str,
        scores: Mapping[int, ExitScores],
        gates: Mapping[int, Gate],
        parts: PieceSplit,
        steps: _StepCounter,
    ) -> list[Choice]:
        """Adds choices near each target, and measures all on every piece for selection."""
        found = {one.proposal for one in curve}
        for target in (self._job.target, *self._job.others):
            ordered = by_risk(curve, target)
            risks = [mean_risk(one.outcomes, target) for one in ordered]
            if target.grows and risks and risks[0] > target.limit:
                no_exits = Proposal(criterion, (), 2.0 * PRICES[0])
                found |= set(interpolated(no_exits, ordered[0].proposal))
            for one, other, low, high in zip(ordered, ordered[1:], risks, risks[1:], strict=False):
                if low <= target.limit < high:
                    found |= set(interpolated(one.proposal, other.proposal))
        by_price = sorted(found, key=lambda one: one.price, reverse=True)
        advance = steps.begin(f"measuring choices: {criterion}", len(found) * len(parts.select))
        return self._selected(by_price, scores, gates, parts.select, advance)

    def _promised(
        self,
        choices: Sequence[Choice],
        criterion: str,
        gates: Mapping[int, Gate],
        pieces: Sequence[Piece],
        steps: _StepCounter,
    ) -> tuple[TargetResult, ...]:
        oracle = self._oracle_with(criterion, gates)
        trial = PromiseTest(
            measure=lambda choice, index: self._outcome(choice, oracle, pieces[index]),
            sources=[piece.source for piece in pieces],
            delta=self._job.delta,
            most_tokens=self._job.most_tokens,
        )
        found = []
        for target in (self._job.target, *self._job.others):
            tried = steps.begin(f"testing {target.name}", len(choices))
            keeping = passing_choices(choices, target, trial, tried)
            best = self._best(keeping, target)
            point = None if best is None else self._point(best, target, trial)
            found.append(TargetResult(target=target, point=point, kept=len(keeping)))
        return tuple(found)

    def _best(self, keeping: Sequence[Choice], target: Target) -> Choice | None:
        if not target.grows:
            return max(keeping, key=lambda one: summarise(one.outcomes).agreement, default=None)
        cheaper = [one for one in keeping if self._cost(one) < 1.0]
        return min(cheaper, key=self._cost, default=None)

    def _point(self, best: Choice, target: Target, trial: PromiseTest) -> OperatingPoint:
        """The choice with its promise, and with its means over the test pieces."""
        found = trial.summary(best)
        return replace(
            best.point,
            agreement=target.agreement,
            found={
                "agreement": round(found.agreement, 5),
                "mean_depth": round(found.mean_depth, 4),
                "perplexity": round(found.perplexity, 4),
                "full_depth_perplexity": round(found.full_perplexity, 4),
                "cost": round(relative_cost(found, self._job.costs, self._job.mode), 4),
                "checks": round(found.checks, 4),
            },
        )


class _StepCounter:
    """Reports progress of one kind of work after the other."""

    def __init__(self, progress: StepProgress) -> None:
        self._progress = progress

    def begin(self, doing: str, total: int) -> Callable[[], None]:
        """Begins work of `total` steps; call the result after each."""
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
