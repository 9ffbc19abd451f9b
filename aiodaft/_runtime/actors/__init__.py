"""Actors that live in this process, and the calls that come to them. May import objects and the rooms below it."""
