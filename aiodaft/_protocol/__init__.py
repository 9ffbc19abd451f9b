"""The rules of aiodaft without any I/O: pure, synchronous, without a clock."""
