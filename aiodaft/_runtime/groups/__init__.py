"""What members of groups do together: collectives, tensors that move between layouts, process groups of torch.

May import `channels`, `graphs`, `calls`, `actors`, `objects`, `connections`, `serialization`, `process`, `platform` and
`_protocol`.
"""
