"""Hugging Face's keys of layers with sliding windows."""

from collections.abc import MutableMapping
from typing import Any

from torchtrain_families.sliding_windows import SlidingWindowConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read(content: MutableMapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SlidingWindowConfig``; leaves in ``content``, as for a Llama, those of layers of full attention.

    For what it lacks, ``content`` must have ``sliding_window_pattern`` and ``rope_local_base_freq``, keys of Gemma.
    """
    types, interval = content.pop("layer_types", None), content["sliding_window_pattern"]
    if types is not None and FULL in types:
        interval = types.index(FULL) + 1
    if type(interval) is not int or interval < 1:
        raise ValueError(f"sliding_window_pattern = {interval!r} must be an integer above 0")
    expected = [SLIDING if (layer + 1) % interval else FULL for layer in range(content["num_hidden_layers"])]
    if types not in (None, expected):
        raise ValueError(f"layer_types = {types} must have {FULL!r} in the last of each {interval} layers only")
    rope = content.pop("rope_parameters", None) or {}
    if set(rope) - {FULL, SLIDING}:
        raise ValueError(f"rope_parameters = {rope} must be given for {FULL!r} and {SLIDING!r}")
    of_full, local = rope.get(FULL) or {}, rope.get(SLIDING) or {}
    if local.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type = {local['rope_type']!r} of {SLIDING!r} must be 'default'")
    scaling = content.pop("rope_scaling", None) or {}
    content["rope_parameters"] = {"rope_theta": content["rope_theta"], **of_full, **scaling}
    return {
        "sliding_window": content["sliding_window"],
        "full_attention_interval": interval,
        "local_rope_theta": float(local.get("rope_theta", content["rope_local_base_freq"])),
    }


def write(content: MutableMapping[str, Any], config: SlidingWindowConfig) -> None:
    """The reverse of ``read``."""
    layers = range(config.n_layers)
    content["layer_types"] = [SLIDING if config.has_window(layer) else FULL for layer in layers]
    content["sliding_window"], content["sliding_window_pattern"] = config.sliding_window, config.full_attention_interval
    scaling = content["rope_scaling"] or {"rope_type": "default"}
    content["rope_parameters"] = {
        FULL: {"rope_theta": config.rope_theta, **scaling},
        SLIDING: {"rope_theta": config.local_rope_theta, "rope_type": "default"},
    }
