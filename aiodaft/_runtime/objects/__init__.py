"""Refs and the values behind them: stored, received, transferred, broadcast, freed.

May import: `connections`, `serialization`, `process`, `platform`, the protocol and the transports. What it wants of
actors, calls and agents is in `owner.ObjectsOwner`.
"""
