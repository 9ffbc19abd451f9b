"""Restarts, in the words of OTP."""
