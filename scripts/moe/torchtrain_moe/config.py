"""Config of a mixture of experts."""

from dataclasses import dataclass, field

from torchtrain.models.llama import TransformerConfig


@dataclass(frozen=True)
class MoEConfig(TransformerConfig):
    """``ffn_dim`` is the inner width of one expert.

    ``n_experts``: experts per layer, of which each token uses ``top_k``. ``normalize_top_k``: the weights of these are
    divided by their sum. ``norm_all_heads``: queries and keys are normalized over all heads at once, as in OLMoE, and
    not each head by itself.

    The other fields are losses and rules of training, which do not change what a trained model computes; None: without.
    Losses are means over layers.

    ``batch_balance_weight``: factor on E * sum_e f_e P_e, where P_e is the mean probability of expert e over the tokens
    of the global batch, and f_e its share of the choices of the global batch of the step before.
    ``sequence_balance_weight``: factor on the mean over sequences of E * sum_e f_e P_e, both of the same sequence.
    ``z_weight``: factor on the mean over tokens of the squared log-sum-exp of the router's logits.
    ``bias_rate``: after each step, experts with less than the mean load get this much added to a bias by which experts
    are chosen, and the others get it subtracted.

    Raises:
        ValueError: a value is invalid; the message names the rule.
    """

    n_experts: int = 8
    top_k: int = 2
    normalize_top_k: bool = True
    norm_all_heads: bool = False
    batch_balance_weight: float | None = field(default=None, compare=False)
    sequence_balance_weight: float | None = field(default=None, compare=False)
    z_weight: float | None = field(default=None, compare=False)
    bias_rate: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k = {self.top_k} must be at most n_experts = {self.n_experts}")


TRAINING_FIELDS = ("batch_balance_weight", "sequence_balance_weight", "z_weight", "bias_rate")
