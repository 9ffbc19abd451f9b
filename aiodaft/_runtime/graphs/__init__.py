"""Compiled graphs: the owner that starts runs, and the participants that execute them.

`aiodaft.graph` captures calls. The owner cuts the dataflow into plans, installs them in the processes of the actors
(`graph_value.Deployment`), starts runs and takes their results (`owner`). A `participant` runs its strands as calls of
the hosted actors; values between steps are `graph_value`s. `Graphs` handles the messages and is the room's entrance.
The plans, and the states of graphs and runs, are in `_protocol.graphs`.
"""
