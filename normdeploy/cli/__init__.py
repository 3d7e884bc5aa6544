"""The verbs of the command line, one file each: they parse, call the stage behind and print. Nothing heavy is imported
before one runs."""
