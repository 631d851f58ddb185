"""Images in prompts: a file per family of models, and the process that decodes images."""
