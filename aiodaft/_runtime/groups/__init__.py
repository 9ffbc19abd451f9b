"""The common work of members of groups: collectives, tensors that move between layouts, process groups of torch.

May import `channels`, `graphs`, `calls`, `actors`, `objects`, `connections`, `serialization`, `process`, `platform` and
`_protocol`.
"""
