"""Refs and the values behind them: stored, received, transferred, broadcast, freed."""
