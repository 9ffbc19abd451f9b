"""Torch code written for one device, run by a group of workers: a strategy, which is data, says how."""
