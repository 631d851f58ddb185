"""The `piecework` command, a file a subcommand."""
