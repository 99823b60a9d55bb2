"""One module a command: read the arguments, call the library, write the results, print where they are."""
