"""The text of `--allow-plugins`, an option of the verbs that load a folder."""

ALLOW_PLUGINS = "Run the Python files that the folder's config.yaml names as plugins. Only if you trust them."
