"""Distance of each model family from its implementation in transformers, for each RoPE scaling.

    python scripts/benchmarks/family_parity.py

Prints a markdown table, with the families of scripts/families if that package is installed. A small random model of
transformers is saved, read by torchtrain, exported and read again.
The reference is transformers in float32: with its "eager" attention, and where it is named with "sdpa", its default.
Beside the distance of torchtrain in bfloat16 is that of transformers in bfloat16, with "sdpa".
"""

import copy
import itertools
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor

from torchtrain.checkpoint.states import ModelState
from torchtrain.checkpoint.weights import load_weights
from torchtrain.cli import run_and_exit
from torchtrain.config.registry import MODELS
from torchtrain.distributed.connections import gloo_backend
from torchtrain.models.spec import Decoder, build_model
from torchtrain.plugins.huggingface.config import read_hf_config
from torchtrain.plugins.huggingface.safetensors_folder import save_hf

DIM, VOCAB, SEQ_LEN, ORIGINAL_SEQ_LEN = 128, 1024, 256, 64
SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": 2 * DIM,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ_LEN,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
Keys = dict[str, Any]
FAMILIES: dict[str, tuple[str, Keys]] = {  # the name in transformers, and keys of config.json
    "Llama 2": ("Llama", {"num_key_value_heads": 4}),
    "Llama 3": ("Llama", {}),
    "Mistral": ("Mistral", {"sliding_window": None, "head_dim": 48}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 48}),
}
EXAMPLES: dict[str, tuple[str, Keys]] = {  # those of the package in scripts/families
    "SmolLM 3": ("SmolLM3", {}),
    "Granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3": ("Olmo3", {"sliding_window": 48}),
    "Gemma 3": (
        "Gemma3Text",
        {"sliding_window": 48, "sliding_window_pattern": 2, "head_dim": 48, "query_pre_attn_scalar": 40},
    ),
}
_LENGTH = {"factor": SEQ_LEN / ORIGINAL_SEQ_LEN, "original_max_position_embeddings": ORIGINAL_SEQ_LEN}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": _LENGTH["factor"]},
    "llama3": {"rope_type": "llama3", **_LENGTH, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", **_LENGTH},
}
LOGITS_STD = 3.0  # about that of trained models, so that probabilities are not uniform
TOKENS = torch.randint(0, VOCAB, (4, SEQ_LEN), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Distance:
    """Distance of logits from those of the reference."""

    logits: float
    """Largest absolute difference of a logit."""
    kl: float
    """Kullback-Leibler divergence of the reference from it: mean over tokens, in nats."""

    def worst(self, other: "Distance") -> "Distance":
        return Distance(max(self.logits, other.logits), max(self.kl, other.kl))


@dataclass(frozen=True)
class Parity:
    """Distances of one model from transformers in float32, with "eager" attention unless another is named."""

    float32: Distance
    float32_from_sdpa: Distance  # from transformers in float32 with "sdpa" attention
    bfloat16: Distance
    theirs_bfloat16: Distance  # transformers in bfloat16 with "sdpa" attention
    round_trip_weights: float
    """Largest difference of a weight after an export in float32, read by torchtrain and by transformers."""
    round_trip: Distance  # transformers with the export
    largest_logit: float
    """Of the reference."""

    def worst(self, other: "Parity") -> "Parity":
        """The larger of each number."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Parity(*(a.worst(b) if isinstance(a, Distance) else max(a, b) for a, b in pairs))


def random_model(family: str, scaling: str, tied: bool) -> Any:
    """A model of transformers in which norms and biases differ from their initial values."""
    kind, keys = {**FAMILIES, **EXAMPLES}[family]
    rope = SCALINGS[scaling]
    given = {**SIZES, **keys, "tie_word_embeddings": tied, **({} if rope is None else {"rope_scaling": dict(rope)})}
    config = getattr(transformers, f"{kind}Config")(**given)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            mean, std = float(kind != "Gemma3Text"), 0.1  # Gemma adds 1
        elif parameter.ndim == 1:  # a bias
            mean, std = 0.0, 0.1
        elif "embed_tokens" in name or "lm_head" in name:
            mean, std = 0.0, LOGITS_STD / DIM**0.5
        else:
            mean, std = 0.0, parameter.shape[1] ** -0.5
        torch.nn.init.normal_(parameter, mean, std, generator=generator)
    return model.eval()


def read(folder: Path) -> Decoder:
    """The model in a Hugging Face folder."""
    model = build_model(read_hf_config(folder))
    load_weights([model], folder, model.config)
    return model


def distance(found: Tensor, reference: Tensor) -> Distance:
    """Distance of the logits ``found`` (bs, seq, vocab) from ``reference``."""
    found, reference = found.double(), reference.double()
    expected, actual = reference.log_softmax(-1), found.log_softmax(-1)
    kl = (expected.exp() * (expected - actual)).sum(-1).mean()
    return Distance((found - reference).abs().max().item(), kl.item())


@torch.no_grad()
def measure(family: str, scaling: str, tied: bool, folder: Path) -> Parity:
    """Distances of a random model, which is saved in ``folder``. Needs a process group."""
    theirs = random_model(family, scaling, tied)
    theirs.save_pretrained(folder / "theirs")
    ours = read(folder / "theirs")
    reference = theirs(TOKENS).logits
    logits = ours(TOKENS)

    state = ModelState([ours], ours.config.tied_embeddings).state_dict()
    save_hf(state, folder / "export", ours.config, "float32", "")
    again, exported = read(folder / "export"), load(folder / "export")
    pairs = [(again.get_parameter(name), parameter) for name, parameter in ours.named_parameters()]
    pairs += [(exported.get_parameter(name), parameter) for name, parameter in theirs.named_parameters()]
    moved = max((a - b).abs().max().item() for a, b in pairs)
    round_trip = distance(exported(TOKENS).logits, reference)

    sdpa, theirs_in_bfloat16 = (load(folder / "theirs", "sdpa", dtype) for dtype in (torch.float32, torch.bfloat16))
    in_bfloat16 = copy.deepcopy(ours)
    for parameter in in_bfloat16.parameters():  # not the buffers: the RoPE tables remain float32, there as here
        parameter.data = parameter.data.to(torch.bfloat16)
    return Parity(
        distance(logits, reference),
        distance(logits, sdpa(TOKENS).logits),
        distance(in_bfloat16(TOKENS), reference),
        distance(theirs_in_bfloat16(TOKENS).logits, reference),
        moved,
        round_trip,
        reference.abs().max().item(),
    )


def load(folder: Path, attention: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    """The model that transformers loads."""
    options = {"dtype": dtype, "attn_implementation": attention}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def measure_both(family: str, scaling: str, folder: Path) -> Parity:
    """The larger distances of a model with tied embeddings and of one without."""
    untied, tied = (measure(family, scaling, tied, folder / f"tied-{tied}") for tied in (False, True))
    return untied.worst(tied)


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    examples = EXAMPLES if "olmo2" in MODELS else {}
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES, *examples], default=[*FAMILIES, *examples])
    families = parser.parse_args().family
    torch.set_num_threads(1)
    torch.distributed.init_process_group(gloo_backend(), store=torch.distributed.HashStore(), rank=0, world_size=1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, PyTorch {torch.__version__}. Each cell: largest difference of a")
    print("logit, KL divergence in nats per token; of models with and without tied embeddings the larger.")
    print("Round trip: after an export in float32.\n")
    print("| family | RoPE scaling | float32 | float32, from sdpa | bfloat16 | transformers, bfloat16 | round trip |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    largest = 0.0
    for family, scaling in itertools.product(families, SCALINGS):
        with TemporaryDirectory() as folder:
            found = measure_both(family, scaling, Path(folder))
        cells = [found.float32, found.float32_from_sdpa, found.bfloat16, found.theirs_bfloat16, found.round_trip]
        texts = [f"{cell.logits:.1e}, {cell.kl:.1e}" if cell.logits else "0" for cell in cells]
        texts[-1] = texts[-1] if found.round_trip_weights == 0 else f"weights {found.round_trip_weights:.1e}"
        print(f"| {family} | {scaling} | {' | '.join(texts)} |", flush=True)
        largest = max(largest, found.largest_logit)
    print(f"\nThe largest logit is {largest:.1f}.")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
