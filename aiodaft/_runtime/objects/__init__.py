"""Refs and the values behind them: stored, received, transferred, broadcast, freed.

May import: `connections`, `serialization`, `process`, `platform`, the protocol and the transports. Its interface to
actors, calls and agents is `owner.ObjectsOwner`.
"""
