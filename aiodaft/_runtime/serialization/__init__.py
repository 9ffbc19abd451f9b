"""Python values and exceptions to bytes and buffers, and back.

Imports `process`, `platform`, the protocol, the transports and the words of the API (refs, handles).
"""
