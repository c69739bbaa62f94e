"""Private names of PyTorch that ``verify_layouts`` uses, and their purposes; see ``torchtrain/torch_internals.py``."""

# Members that are replaced, and their purposes.
MEMBERS = {
    "torch.autograd._engine_run_backward": "compute in float64 what a checkpoint computes again",
}
