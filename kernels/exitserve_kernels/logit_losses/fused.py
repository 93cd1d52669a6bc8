"""Losses of logits and their gradient in Triton: a program for each token, two passes over its row.

The first pass keeps running sums; the second writes the gradient over the logits.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from exitserve_kernels.in_triton import narrowed, tanh

BLOCK = 2048
"""Logits at a time. 8 a thread: 16 bytes of bfloat16 a load, and registers for 4 programs on a
multiprocessor, one of which computes while others wait for memory."""
WARPS = 8


@triton.jit
def _loaded(values, place, inside, step, soft_cap, HAS_CAP: tl.constexpr):
    """A block of logits in float32, soft-capped; -inf beyond the vocabulary."""
    found = tl.load(values + place.to(tl.int64) * step, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    if HAS_CAP:
        found = tl.where(inside, soft_cap * tanh(found / soft_cap), float("-inf"))
    return found


@triton.jit
def _raised(top, values):
    """The new maximum, and what to subtract from logits: 0 as long as the maximum is -inf."""
    top = tl.maximum(top, tl.max(values, axis=0))
    return top, tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _sums(
    logits,
    teacher,
    label,
    vocabulary,
    step,
    teacher_step,
    coolness,
    soft_cap,
    HAS_TEACHER: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COOLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first pass over a row.

    Returns the maximum; the sum of powers of all but the label, and of all at the temperature; the
    teacher's maximum and sum at the temperature; and the sum of teacher - student weighted by that.
    """
    top = float("-inf")
    teacher_top = float("-inf")
    others = tl.zeros([BLOCK], dtype=tl.float32)
    cooled = tl.zeros([BLOCK], dtype=tl.float32)
    taught = tl.zeros([BLOCK], dtype=tl.float32)
    gaps = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < vocabulary
        student = _loaded(logits, place, inside, step, soft_cap, HAS_CAP)
        before = top
        top, base = _raised(top, student)
        power = tl.where(place == label, 0.0, tl.exp(student - base))
        others = others * tl.exp(before - base) + power
        if COOLED:
            power = tl.exp((student - base) * coolness)
            cooled = cooled * tl.exp((before - base) * coolness) + power
        if HAS_TEACHER:
            target = _loaded(teacher, place, inside, teacher_step, soft_cap, False)
            before = teacher_top
            teacher_top, base = _raised(teacher_top, target)
            weight = tl.exp((target - base) * coolness)
            shrunk = tl.exp((before - base) * coolness)
            taught = taught * shrunk + weight
            # 0 log 0 is 0, not 0 times infinity.
            gaps = tl.where(shrunk == 0.0, 0.0, gaps * shrunk)
            gaps += tl.where(weight == 0.0, 0.0, weight * (target - student))
    sums = (tl.sum(others, axis=0), tl.sum(cooled, axis=0))
    return top, sums[0], sums[1], teacher_top, tl.sum(taught, axis=0), tl.sum(gaps, axis=0)


@triton.jit
def _write_gradient(
    logits,
    teacher,
    label,
    vocabulary,
    step,
    teacher_step,
    coolness,
    soft_cap,
    top,
    teacher_top,
    of_label,
    of_power,
    of_cooled,
    of_taught,
    HAS_TEACHER: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COOLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The second pass over a row; `of_` are factors of powers, `of_label` the label's p - 1."""
    blocks = tl.cdiv(vocabulary, BLOCK)
    for block in range(0, blocks):
        # Backwards: what was read last is in the cache still.
        place = (blocks - 1 - block) * BLOCK + tl.arange(0, BLOCK)
        inside = place < vocabulary
        student = _loaded(logits, place, inside, step, soft_cap, HAS_CAP)
        power = tl.exp(student - top)
        gradient = tl.where(place == label, of_label, of_power * power)
        if HAS_TEACHER:
            if COOLED:
                power = tl.exp((student - top) * coolness)
            target = _loaded(teacher, place, inside, teacher_step, soft_cap, False)
            taught = tl.exp((target - teacher_top) * coolness)
            gradient += of_cooled * power - of_taught * taught
        if HAS_CAP:
            tangent = student / soft_cap
            gradient *= 1.0 - tangent * tangent
        tl.store(
            logits + place.to(tl.int64) * step,
            narrowed(gradient, logits.dtype.element_ty),
            mask=inside,
        )


@triton.jit
def _losses(
    logits,
    labels,
    ce_scale,
    teacher,
    kl_scale,
    cross_entropy,
    divergence,
    vocabulary,
    stride,
    step,
    teacher_stride,
    teacher_step,
    coolness,
    soft_cap,
    HAS_LABELS: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COOLED: tl.constexpr,
    DIFFERENTIATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    teacher += row * teacher_stride
    label = -1
    if HAS_LABELS:
        label = tl.load(labels + row).to(tl.int32)
        own = tl.load(logits + label.to(tl.int64) * step).to(tl.float32)
        if HAS_CAP:
            own = soft_cap * tanh(own / soft_cap)
    top, others, cooled, teacher_top, taught, gaps = _sums(
        logits,
        teacher,
        label,
        vocabulary,
        step,
        teacher_step,
        coolness,
        soft_cap,
        HAS_TEACHER,
        HAS_CAP,
        COOLED,
        BLOCK,
    )
    total = others
    of_label, of_power, of_cooled, of_taught = 0.0, 0.0, 0.0, 0.0
    if HAS_LABELS:
        total += tl.exp(own - top)
        tl.store(cross_entropy + row, tl.log(total) - (own - top))
        if DIFFERENTIATE:
            of_power = tl.load(ce_scale + row) / total
            # p - 1 without cancellation where p is almost 1.
            of_label = -of_power * others
    if HAS_TEACHER:
        if not COOLED:
            cooled = total
        gap = coolness * (gaps / taught - (teacher_top - top))
        tl.store(divergence + row, gap + (tl.log(cooled) - tl.log(taught)))
        if DIFFERENTIATE:
            scale = tl.load(kl_scale + row) * coolness
            of_cooled, of_taught = scale / cooled, scale / taught
    if DIFFERENTIATE:
        _write_gradient(
            logits,
            teacher,
            label,
            vocabulary,
            step,
            teacher_step,
            coolness,
            soft_cap,
            top,
            teacher_top,
            of_label,
            of_power,
            of_cooled,
            of_taught,
            HAS_TEACHER,
            HAS_CAP,
            COOLED,
            BLOCK,
        )


def logit_losses(
    logits: Tensor,
    labels: Tensor | None,
    ce_scale: Tensor | None,
    teacher: Tensor | None,
    kl_scale: Tensor | None,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    differentiate: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """See `exitserve_kernels.logit_losses`; at least one logit."""
    count, vocabulary = logits.shape
    # A place that no kernel reads or writes takes any tensor.
    losses = logits.new_empty(2, count, dtype=torch.float32)
    scales = [losses if one is None else one.float().contiguous() for one in (ce_scale, kl_scale)]
    taught = logits if teacher is None else teacher
    _losses[(count,)](
        logits,
        logits if labels is None else labels.contiguous(),
        scales[0],
        taught,
        scales[1],
        losses[0],
        losses[1],
        vocabulary,
        *logits.stride(),
        *taught.stride(),
        1.0 / temperature,
        1.0 if soft_cap is None else soft_cap,
        HAS_LABELS=labels is not None,
        HAS_TEACHER=teacher is not None,
        HAS_CAP=soft_cap is not None,
        COOLED=teacher is not None and temperature != 1.0,
        DIFFERENTIATE=differentiate,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return None if labels is None else losses[0], None if teacher is None else losses[1]
