"""Restarts of actors, in the words of OTP.

May import node, peer and the rooms below them; not the controller.
"""
