"""Model folders, files and hub ids become weights."""
