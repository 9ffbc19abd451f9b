"""Uses a GPU when it is imported."""

import torch

TABLE = torch.arange(8, device="cuda")
