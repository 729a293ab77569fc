"""What some model types want and this machine has not, so that they run here all the same."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models.bitlinear_layers import BitLinear

from worker.compute import shard


@contextmanager
def stand_ins() -> Iterator[None]:
    """A module that olmo only wants to exist; on a CPU experts in 16 bits, and bitnet's Metal kernel."""
    with ExitStack() as stack:
        if "hf_olmo" not in sys.modules:
            sys.modules["hf_olmo"] = ModuleType("hf_olmo")
            stack.callback(sys.modules.pop, "hf_olmo")
        if mx.default_device() == mx.cpu:
            stack.enter_context(patch.object(mx, "gather_mm", _in_float32))
            stack.enter_context(patch.object(shard, "multiplies_experts", lambda dtype: True))
            stack.enter_context(patch.object(BitLinear, "execute_matmul_kernel", _bit_product))
        yield


_gather_mm = mx.gather_mm


def _in_float32(a: mx.array, b: mx.array, *rest: Any, **more: Any) -> mx.array:
    """A CPU multiplies gathered matrices in float32 only."""
    return _gather_mm(a.astype(mx.float32), b.astype(mx.float32), *rest, **more).astype(a.dtype)


def _bit_product(self: BitLinear, x: mx.array, packed: mx.array) -> mx.array:
    rows = mx.concatenate([((packed >> (2 * i)) & 3).astype(x.dtype) - 1 for i in range(4)])
    return x @ rows[: self.out_features].T
