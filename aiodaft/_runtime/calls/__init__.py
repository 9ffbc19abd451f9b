"""Calls that this process makes: handles, order, answers, restarted actors."""
