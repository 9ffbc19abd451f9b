"""Memory to send from and to receive into."""
