"""Which node an actor, a gang of actors or a mesh goes to: decided from views of the nodes, which may be old."""
