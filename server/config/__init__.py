"""The settings of a server, from flags, files and the environment."""
