"""exp in float32 from additions and multiplications alone, so that loops over it become vector code.

Cody and Waite's reduction: exp(x) = 2^n * exp(r) with n = round(x / ln 2) and |r| <= ln(2) / 2, exp(r) by the
polynomial of the Cephes library (`expf.c`, Moshier), whose relative error is below 2e-7.
"""

from __future__ import annotations

import numpy as np

from .compiled import inner
from .vector_ir import fma, scale_by_power

LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
ROUNDER = np.float32(1.5 * 2**23)
"""Adding it leaves a number's nearest integer in the low bits of the mantissa."""
LOWEST, HIGHEST = np.float32(-87.0), np.float32(88.0)
C0, C1, C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C3, C4, C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@inner
def exp(x):  # type: ignore[no-untyped-def]
    """exp of a float32; 0 below -87, exp(88) above 88 (still finite), NaN for NaN."""
    bounded = HIGHEST if x > HIGHEST else x
    bounded = LOWEST if bounded < LOWEST else bounded
    shifted = fma(bounded, LOG2_E, ROUNDER)
    n = shifted - ROUNDER
    r = fma(-n, LN2_LOW, fma(-n, LN2_HIGH, bounded))
    poly = fma(fma(fma(fma(fma(C0, r, C1), r, C2), r, C3), r, C4), r, C5)
    value = fma(poly * r, r, r) + np.float32(1.0)
    return np.float32(0.0) if x < LOWEST else scale_by_power(value, shifted)
