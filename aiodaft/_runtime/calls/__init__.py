"""Calls that this process makes."""
