"""Looks for a GPU when it is imported, as modules of users do."""

import torch

AVAILABLE = torch.cuda.is_available()
DEVICE = "cuda" if AVAILABLE else "cpu"
