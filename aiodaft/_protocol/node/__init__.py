"""Workers: their lives, their heartbeats, their resources and names, and how they ended."""
