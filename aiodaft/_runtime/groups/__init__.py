"""The common work of members of groups: collectives, tensors that move between layouts, process groups of torch."""
