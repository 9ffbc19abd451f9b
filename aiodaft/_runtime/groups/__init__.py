"""Groups: moves tensors from the ranks of one group to those of another (`resharding`).

May import `channels`, `graphs`, `calls`, `actors`, `objects`, `connections`, `serialization`, `process`, `platform` and
`_protocol`.
"""
