"""The output and logs of actors: from their processes to the terminal, the handlers and the files of the program."""
