"""Who is in a group, what its members do together, and how tensors are laid out over them."""
