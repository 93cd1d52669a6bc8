"""A calibration from its text to its promises: proposals for each criterion, tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, get_args

from exitserve.agreement import FullDepthPass
from exitserve.calibration.choice import (
    Choice,
    PromiseTest,
    Target,
    by_risk,
    drafting_of,
    mean_risk,
    passing_choices,
    relative_cost,
)
from exitserve.calibration.exact import ExactOutcomes
from exitserve.calibration.outcomes import (
    Outcome,
    Piece,
    Source,
    measure_outcome,
    run_at_full_depth,
    summarise,
)
from exitserve.calibration.pieces import PieceSplit
from exitserve.calibration.proposals import (
    BETWEEN,
    FINE_PRICES,
    PRICES,
    Proposal,
    end_thresholds,
    propose,
)
from exitserve.calibration.rows import RowsEntry
from exitserve.calibration.scores import ExitScores, PieceReading, all_scores, read_exits
from exitserve.calibration.selection import Selection
from exitserve.calibration.unfinished import Recall, anew
from exitserve.checkpoint.calibration import ALL, FREQUENT, Calibration, OperatingPoint
from exitserve.checkpoint.decoder import hidden_of
from exitserve.costs.curves import StepCosts
from exitserve.policy import ExitPolicy, Mode
from exitserve.reference import Reference
from exitserve.reporting.progress import StepProgress
from exitserve_kernels.exit_check import CRITERIA, criterion_of

COMPARED = 25
"""Pieces of each source on which criteria are compared; the winner is measured on all."""
MOST_KEPT = 2**30
"""Bytes of what layers gave at full depth that are kept, so that choices need not repeat them."""
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
    costs: StepCosts
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
    promised: tuple[TargetResult, ...]
    """The target that was asked for first."""
    curves: Mapping[str, Sequence[Choice]]
    """By criterion, the choices that were measured, the safest first."""
    scores: Mapping[int, ExitScores]
    """By exit layer, on the pieces for selection at full depth."""
    exit_rows: list[int] | None
    """The tokens whose rows of the head were read by checks; None: all."""
    rows_table: Sequence[RowsEntry] = ()
    """What more rows would give, or fewer; nothing where all were read."""

    @property
    def chosen(self) -> TargetResult | None:
        """The target of `auto`: what was asked for first, or the strictest agreement below it that
        could be promised instead; None where none could."""
        first = self.promised[0]
        if first.point is not None:
            return first
        kept = [one for one in self.promised if one.point is not None]
        weaker = [one for one in kept if one.target.agreement < first.target.agreement]
        return min(weaker, key=lambda one: one.target.limit, default=None)

    def calibration(self, job: CalibrationJob, provenance: Mapping[str, Any]) -> Calibration:
        """The record for the checkpoint."""
        chosen = self.chosen
        points = [one.point for one in self.promised if one.point is not None]
        return Calibration(
            target=(chosen or self.promised[0]).target.name,
            mode=job.mode,
            criterion=self.criterion,
            confidence_level=1.0 - job.delta,
            num_layers=job.costs.num_layers,
            chosen=FULL_DEPTH if chosen is None or chosen.point is None else chosen.point,
            exit_rows=ALL if self.exit_rows is None else FREQUENT,
            agreement_at={
                layer: round(float(found.agrees.double().mean()), 4)
                for layer, found in self.scores.items()
            },
            points=tuple(
                sorted(
                    (one for one in points if chosen is None or one is not chosen.point),
                    key=lambda one: one.agreement or 0.0,
                )
            ),
            provenance=provenance,
        )


class _Path(NamedTuple):
    """Proposals of one criterion, and its curve."""

    proposals: list[Proposal]
    """The safest first."""
    curve: list[Choice]
    """Those that were measured, the safest first."""


class Calibrator:
    """Runs pieces through the oracle, and keeps the full-depth pass of each."""

    def __init__(
        self,
        reference: Reference,
        job: CalibrationJob,
        progress: StepProgress,
        recall: Recall = anew,
    ) -> None:
        self._reference, self._job, self._progress = reference, job, progress
        self._recall = recall
        self._full: dict[Piece, FullDepthPass] = {}
        self._kept = 0
        self._exact: list[tuple[ExactOutcomes, set[Piece]]] = []
        """Of the pieces for selection and of the test, where keys and values stay exact."""
        self._outcomes: dict[tuple[Proposal, Piece], Outcome] = {}

    def calibrate(self, parts: PieceSplit, criteria: Sequence[str] = CRITERIA) -> CalibrationResult:
        """Chooses one of the criteria, and tests choices for every target."""
        advance = self._begin("reading every exit", len(parts.select))
        readings = self._read("select", parts.select, advance)
        scores = all_scores(readings)
        if self._drafts:
            advance = self._begin("reading the test", len(parts.test))
            tested = self._read("test", parts.test, advance)
            self._exact = [
                (ExactOutcomes(readings), set(parts.select)),
                (ExactOutcomes(tested), set(parts.test)),
            ]
        few = parts.select if self._drafts else _first_of_each(parts.select, COMPARED)
        compared = {str(one): self._compared(str(one), scores, few) for one in criteria}
        curves = {name: one.curve for name, one in compared.items()}
        criterion = min(curves, key=lambda one: self._cost_at_target(curves[one]))
        found, oracle = compared[criterion].proposals, self._oracle_with(criterion)
        trial = self._trial(oracle, parts.test)
        most = (len(found) + BETWEEN * len(self._targets)) * len(parts.select)
        advance = self._begin(f"measuring choices: {criterion}", most)
        selection = self._selection(found, oracle, scores, parts.select, advance)
        for target in self._targets:
            if trial.can_show(target):
                selection.refine(target, trial)
        return CalibrationResult(
            criterion=criterion,
            promised=self._promised(selection.choices, trial),
            curves=curves | {criterion: by_risk(selection.choices, self._job.target)},
            scores=scores,
            exit_rows=None if oracle.exit_rows is None else oracle.exit_rows.tolist(),
        )

    def _begin(self, doing: str, total: int) -> Callable[[], None]:
        """Begins work of `total` steps, whose progress is shown; call the result after each."""
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            self._progress(doing, done, total)

        self._progress(doing, 0, total)
        return advance

    @property
    def _targets(self) -> tuple[Target, ...]:
        return (self._job.target, *self._job.others)

    @property
    def _drafts(self) -> bool:
        """Whether servers will draft, by the layers up to one exit."""
        return self._job.mode == "defer"

    def _compared(
        self, criterion: str, scores: Mapping[int, ExitScores], pieces: Sequence[Piece]
    ) -> _Path:
        """A criterion's proposals, measured around the target: at the draft layer where that costs
        least, or at all exit layers."""
        oracle, paths = self._oracle_with(criterion), []
        ways = [{layer: own} for layer, own in scores.items()] if self._drafts else [scores]
        for used in ways:
            found = self._proposed(used, criterion)
            most = len(found).bit_length() * len(pieces)
            advance = self._begin(f"comparing criteria: {criterion}", most)
            selection = self._selection(found, oracle, scores, pieces, advance)
            selection.find(self._job.target)
            paths.append(_Path(found, by_risk(selection.choices, self._job.target)))
        return min(paths, key=lambda one: self._cost_at_target(one.curve))

    def _proposed(self, scores: Mapping[int, ExitScores], criterion: str) -> list[Proposal]:
        costs = self._job.costs.of_tokens(1)
        if not self._drafts:
            return propose(scores, criterion, costs, prices=PRICES)
        # Each token is checked when it is judged, whatever the threshold, and nothing propagates.
        costs = replace(costs, check=0.0, fill=0.0)
        return propose(scores, criterion, costs, prices=FINE_PRICES)

    def _selection(
        self,
        found: Sequence[Proposal],
        oracle: Reference,
        scores: Mapping[int, ExitScores],
        pieces: Sequence[Piece],
        advance: Callable[[], None],
    ) -> Selection:
        def measure(proposal: Proposal) -> Choice:
            choice = Choice(proposal, self._ends(scores, proposal), ())
            outcomes = []
            for piece in pieces:
                outcomes.append(self._outcome(choice, oracle, piece))
                advance()
            return replace(choice, outcomes=tuple(outcomes))

        return Selection(found, measure, cheap=self._drafts)

    def _ends(self, scores: Mapping[int, ExitScores], proposal: Proposal) -> dict[int, float]:
        least = self._job.target.agreement
        return end_thresholds(scores, proposal, least, self._job.fewest_ends)

    def _outcome(self, choice: Choice, oracle: Reference, piece: Piece) -> Outcome:
        key = choice.proposal, piece
        if key not in self._outcomes:
            policy = choice.policy(self._job.mode)
            if self._drafts:
                group = next(one for one, members in self._exact if piece in members)
                found = zip(group.pieces, group.of(oracle, policy), strict=True)
                self._outcomes |= {(choice.proposal, one): outcome for one, outcome in found}
            else:
                self._outcomes[key] = self._measured(policy, oracle, piece)
        return self._outcomes[key]

    def _measured(self, policy: ExitPolicy, oracle: Reference, piece: Piece) -> Outcome:
        def measure() -> dict[str, Any]:
            return asdict(measure_outcome(oracle, piece, self._full_depth(piece), policy))

        name = f"outcome {oracle.criterion} {policy} {piece.source} {hash(piece.token_ids)}"
        return Outcome(**self._recall(name, measure))

    def _read(
        self, part: str, pieces: Sequence[Piece], advance: Callable[[], None]
    ) -> list[PieceReading]:
        found = []
        for index, piece in enumerate(pieces):

            def read(piece: Piece = piece) -> dict[str, Any]:
                return read_exits(self._reference, piece).plain()

            plain = self._recall(f"reading {part} {index}", read)
            found.append(PieceReading.of_plain(piece, plain))
            advance()
        return found

    def _full_depth(self, piece: Piece) -> FullDepthPass:
        if piece not in self._full:
            keep = self._reference.exit_layers if self._kept < MOST_KEPT else ()
            self._full[piece] = full = run_at_full_depth(self._reference, piece, keep)
            self._kept += sum(hidden_of(one).nbytes for one in full.outputs.values())
        return self._full[piece]

    def _oracle_with(self, criterion: str) -> Reference:
        """The oracle as a server runs it under a criterion."""
        return self._reference.variant(criterion_of(criterion), self._reference.exit_rows)

    def _cost(self, choice: Choice) -> float:
        return relative_cost(choice, summarise(choice.outcomes), self._job.costs, self._job.mode)

    def _cost_at_target(self, curve: Sequence[Choice]) -> float:
        """Cost at which a criterion just keeps the target, interpolated; full depth's if never."""
        target = self._job.target
        risks = [mean_risk(one.outcomes, target) for one in curve]
        inside = [i for i, risk in enumerate(risks) if risk <= target.limit]
        if not inside:
            return 1.0
        last = inside[-1]
        cost = self._cost(curve[last])
        if last + 1 < len(curve):
            share = (target.limit - risks[last]) / (risks[last + 1] - risks[last])
            cost += share * (self._cost(curve[last + 1]) - cost)
        return min(1.0, cost)

    def _trial(self, oracle: Reference, pieces: Sequence[Piece]) -> PromiseTest:
        return PromiseTest(
            measure=lambda choice, index: self._outcome(choice, oracle, pieces[index]),
            sources=[piece.source for piece in pieces],
            delta=self._job.delta,
            most_tokens=self._job.most_tokens,
        )

    def _promised(self, choices: Sequence[Choice], trial: PromiseTest) -> tuple[TargetResult, ...]:
        found = []
        for target in self._targets:
            useful = [one for one in choices if self._cost(one) < 1.0]  # full depth costs 1
            tried = self._begin(f"testing {target.name}", len(useful))
            keeping = passing_choices(useful, target, trial, tried)
            best = min(keeping, key=self._cost, default=None)
            point = None if best is None else self._point(best, target, trial)
            found.append(TargetResult(target=target, point=point, kept=len(keeping)))
        return tuple(found)

    def _point(self, best: Choice, target: Target, trial: PromiseTest) -> OperatingPoint:
        """The choice with its promise, and with its means over the test pieces."""
        found, costs = trial.summary(best), self._job.costs
        drafts = {}
        if self._drafts:
            count = drafting_of(best, found, costs).drafts
            drafts = {"drafts": count, "accepted": round(found.accepted, 4)}
        return replace(
            best.point,
            agreement=target.agreement,
            found={
                "agreement": round(found.agreement, 5),
                "mean_depth": round(found.mean_depth, 4),
                "perplexity": round(found.perplexity, 4),
                "full_depth_perplexity": round(found.full_perplexity, 4),
                "cost": round(relative_cost(best, found, costs, self._job.mode), 4),
                "checks": round(found.checks, 4),
                **drafts,
            },
        )


def _first_of_each(pieces: Sequence[Piece], count: int) -> list[Piece]:
    by_source = ([one for one in pieces if one.source == source] for source in get_args(Source))
    return [piece for own in by_source for piece in own[:count]]
