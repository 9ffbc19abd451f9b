"""Compiled graphs: the owner that starts runs, and the participants that execute them.

`aiodaft.graph` captures calls (`captured_call`). The owner cuts the dataflow into plans and installs them in the
processes of the actors (`deployment`), starts runs and takes their results (`owner`). A participant runs its strands
as calls of the hosted actors (`participant`, `strands`); values between steps are `graph_value`s. `registry` handles
the messages and is the room's entrance; `context` is the parts' view of their process. The plans, the states of
graphs and runs, and the values that each run waits for are in `_protocol.graphs` (`plan`, `run`).

May import `calls`, `actors`, `objects`, `connections`, `serialization`, `process`, `platform` and `_protocol`.
"""
