"""The choice of a node for an actor, a gang of actors or a mesh, from views of the nodes, which may be old."""
