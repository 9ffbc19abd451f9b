"""What actors print and log: from their processes to the terminal, the handlers and the files of the program."""
