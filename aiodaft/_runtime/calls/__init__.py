"""Calls that this process makes: handles, order, answers, restarted actors. May import actors and the rooms below."""
