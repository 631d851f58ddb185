"""What subcommands share: flags, settings from files and variables, printable text."""
