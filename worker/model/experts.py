"""Experts: of a layer's weights, those that one token does not read, since it is sent to a few experts only."""

from typing import Any

from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from worker.model.skeleton import Skeleton

# How many experts a token is sent to, by any name that configurations have for it.
_CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
)  # fmt: skip


def idle_bytes(skeleton: Skeleton, config: dict[str, Any]) -> dict[int, int]:
    """By layer: the bytes of experts that a token is not sent to; none where the configuration does not tell."""
    chosen = _num_chosen(config)
    return {number: _idle(layer, chosen) for number, layer in enumerate(skeleton.layers)} if chosen else {}


def _idle(layer: Any, num_chosen: int) -> int:
    idle = 0
    for module in layer.modules():
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear) and "weight" in module:
            num_experts = module.weight.shape[0]
            held = sum(array.nbytes for array in module.parameters().values())
            idle += held * max(0, num_experts - num_chosen) // num_experts
    return idle


def _num_chosen(config: dict[str, Any]) -> int:
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for key in _CHOSEN:
            if isinstance(part.get(key), int) and part[key] > 0:
                return int(part[key])
    return 0
