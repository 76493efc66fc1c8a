"""Kernels of NumPy and PyTorch. Each processor has its own, which add in another order and so round
otherwise."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager

import numpy as np  # noqa: F401  # loads its BLAS
from threadpoolctl import ThreadpoolController

_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NPY_DISABLE_CPU_FEATURES",
    "NPY_ENABLE_CPU_FEATURES",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
)
"""Users choose the kernels of NumPy and PyTorch by them."""


def chosen_kernels() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


@functools.cache  # the search takes 2 ms
def _libraries() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


def one_blas_thread() -> AbstractContextManager[object]:
    """Several threads would share a sum, so that its rounding would depend on the number of cores."""
    limited: AbstractContextManager[object] = _libraries().limit(limits=1)
    return limited


def blas() -> str:
    """Name and version of NumPy's BLAS, and the processors that its kernels are for, such as `openblas
    0.3.31 (Haswell)`."""
    # SciPy may have another one.
    found = sorted(_libraries().info(), key=lambda one: "numpy" not in one["filepath"])
    if not found:
        return "unknown"
    kernels = f" ({found[0]['architecture']})" if found[0].get("architecture") else ""
    return f"{found[0]['internal_api']} {found[0]['version']}{kernels}"
