"""Workers: their lives, their heartbeats, their resources, and how they ended."""
