"""Ranks of float32 scores as integers, and the k-th largest of those that one program holds."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_keys(scores, there):
    """float32 scores as uint32 of the same order; 1 for NaN, 0 where there is no page."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (flipped ^ -2147483648).to(tl.uint32, bitcast=True)
    keys = tl.where(scores != scores, 1, keys)
    return tl.where(there, keys, 0).to(tl.uint32)


@triton.jit
def kth_largest(
    keys, k, BLOCK: tl.constexpr, GROUPS: tl.constexpr, FEW: tl.constexpr = False, PAIRS: tl.constexpr = False
):
    """The largest T that at least k of the keys reach, or one that exactly k reach; and how many reach it.

    ``FEW``: k may exceed GROUPS. ``PAIRS``: two bits a pass, which pays where passes wait and nothing else runs.
    """
    groups = tl.max(tl.reshape(keys, [BLOCK // GROUPS, GROUPS]), 0)
    low = tl.min(groups, 0)  # every group has a key that reaches it
    if FEW:
        low = tl.where(tl.sum((keys >= low).to(tl.int32), 0) < k, low ^ low, low)
    above = tl.where(keys >= low, keys - low, 0)
    span = tl.max(groups, 0) - low
    found = span ^ span
    exponent = (span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # of the span's first bit, or one more
    bit = (found + 1) << tl.minimum(tl.maximum(exponent, 0), 31).to(tl.uint32)
    count = tl.sum((keys >= low).to(tl.int32), 0)
    if PAIRS:
        while (bit > 0) & (count != k) & (count >= 1024):  # until three counts fit in one number
            found, count = _next_bit(above, k, bit, found, count)
            bit = bit >> 1
        while (bit > 0) & (count != k):
            found, count = _next_bits(above, k, bit, found, count)
            bit = bit >> 2
    else:
        while (bit > 0) & (count != k):
            found, count = _next_bit(above, k, bit, found, count)
            bit = bit >> 1
    return low + found, count


@triton.jit
def _next_bit(above, k, bit, found, count):
    """``found`` with the bit, if k numbers still reach it; and how many do."""
    candidate = found | bit
    reached = tl.sum((above >= candidate).to(tl.int32), 0)
    if reached >= k:
        found = candidate
        count = reached
    return found, count


@triton.jit
def _next_bits(above, k, bit, found, count):
    """The same for the bit and the one below it. Fewer than 1,024 numbers reach ``found``."""
    half = bit >> 1
    second = found | bit
    third = second | half
    first = tl.where(half > 0, found | half, second)
    reached = tl.where(above >= first, 1, 0) + tl.where(above >= second, 1024, 0)
    reached = tl.sum(reached + tl.where(above >= third, 1048576, 0), 0)
    firsts, seconds, thirds = reached & 1023, (reached >> 10) & 1023, reached >> 20
    if thirds >= k:
        found = third
        count = thirds
    elif seconds >= k:
        found = second
        count = seconds
    elif firsts >= k:
        found = first
        count = firsts
    return found, count


@triton.jit
def choose(keys, k, threshold, count):
    """Which keys are the k largest, and the place of each in the list; ``count`` keys reach ``threshold``, the k-th
    largest."""
    if count == k:
        chosen = keys >= threshold
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    else:
        ties = k - tl.sum((keys > threshold).to(tl.int32), 0)
        chosen, place = take(keys, threshold, ties, 0, 0)
    return chosen, place


@triton.jit
def take(keys, threshold, ties, greater_before, equal_before):
    """Which of the keys are chosen, and the place of each in the list; ties by age: counts of those before."""
    greater = keys > threshold
    equal = keys == threshold
    packed = tl.where(greater, 65536, 0) + tl.where(equal, 1, 0)
    running = tl.cumsum(packed, 0)
    greaters = greater_before + (running >> 16)
    equals = equal_before + (running & 65535)
    chosen = greater | (equal & (equals <= ties))
    return chosen, greaters + tl.minimum(equals, ties) - 1
