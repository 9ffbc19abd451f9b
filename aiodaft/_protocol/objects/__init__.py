"""The lives of values and streams: who borrows a value, how it is fetched, and how it reaches many."""
