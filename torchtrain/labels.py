"""Labels: the ids of the next tokens, which a model is trained to predict."""

IGNORE_INDEX = -100
"""Label of a position that has no loss, as in ``torch.nn.functional.cross_entropy``."""
