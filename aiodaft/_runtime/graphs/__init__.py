"""Compiled graphs: the owner that starts runs, and the participants that execute them."""
