"""A vLLM without our plugin, which somebody else started. It runs no code of ours."""
