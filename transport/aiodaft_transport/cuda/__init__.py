"""CUDA by IPC handles."""
