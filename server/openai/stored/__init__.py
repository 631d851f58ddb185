"""What clients store in a server: one SQLite file, and the thread that reads and writes it."""
