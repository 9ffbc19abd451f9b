"""The members of a group, their common operations, and the layout of tensors over them."""
