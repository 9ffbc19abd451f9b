"""Python values and exceptions to bytes and buffers, and back."""
