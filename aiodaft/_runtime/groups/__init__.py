"""What the members of groups do together: collectives, and tensors that move from group to group (`resharding`).

May import `channels`, `graphs`, `calls`, `actors`, `objects`, `connections`, `serialization`, `process`, `platform` and
`_protocol`.
"""
