"""A vLLM without our plugin, which somebody else started. It runs none of our code."""
