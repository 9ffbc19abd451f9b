"""The same measurements in aiodaft and in other frameworks.

Each module runs in an interpreter that has its framework and may have no aiodaft: it imports only its framework, torch
and its neighbour `serving`.
"""
