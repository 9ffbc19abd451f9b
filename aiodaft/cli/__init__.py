"""The `aiodaft` command."""
