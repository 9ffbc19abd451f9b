"""Actors that live in this process, and the calls that come to them."""
