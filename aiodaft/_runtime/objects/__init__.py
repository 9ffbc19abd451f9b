"""Refs, and the values behind them: stored, transferred, broadcast, freed."""
